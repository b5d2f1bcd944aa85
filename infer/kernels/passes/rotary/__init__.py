"""Rotary embeddings of queries and keys: their forms, and their fusion with attention on GPUs."""
