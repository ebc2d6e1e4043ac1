"""Rules of the targets, one judge per file, which know nothing of how a request was made."""
