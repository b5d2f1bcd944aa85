"""Encoder-decoder models as two graphs over one paged KV cache."""
