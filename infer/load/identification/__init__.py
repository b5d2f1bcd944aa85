"""Identification of a source by its content; nothing in it is run."""
