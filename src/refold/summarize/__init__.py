"""Models that write summaries: what they are asked, how they are called, and the prompts."""
