"""Attention of a model's own code over a paged KV cache: replaced, routed, and its masks checked."""
