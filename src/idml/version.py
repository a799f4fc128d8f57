"""The version of idml, in a file that every other file may import."""

__version__ = "0.1.0"
