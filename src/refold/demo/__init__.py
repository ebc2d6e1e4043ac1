"""A demonstration that needs no key and no network: a scripted agent reads a folder in a small window."""
