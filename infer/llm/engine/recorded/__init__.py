"""Decode steps on a GPU whose sampling is recorded with them, and whose tokens are read one step late."""
