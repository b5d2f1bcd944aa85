"""Caches of the engine: pages of keys and values, rows of state, and their sizes."""
