"""Losses that are computed in chunks, so that the logits of a whole batch never exist."""
