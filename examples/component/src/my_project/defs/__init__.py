"""The definitions of this project."""
