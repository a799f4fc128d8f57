"""Data sets, and everything between a file and a batch of pixels."""
