"""How many tokens a message takes."""
