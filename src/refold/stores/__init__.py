"""Where streams are kept; one engine per file, one protocol for all."""
