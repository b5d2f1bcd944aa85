"""Folders of sentence-transformers: their modules after the Transformer."""
