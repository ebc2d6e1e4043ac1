"""`refold demo`: a scripted model in a real agent loop reads a folder with a small window."""
