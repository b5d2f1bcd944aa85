"""Layers on the codes of a groupwise-quantized checkpoint: `linear_groupwise` and its kin on a GPU."""
