"""`refold demo`: a scripted model and a real loop read a folder in a small window."""
