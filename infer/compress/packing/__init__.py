"""Weights of a model packed block by block, read where a checkpoint has them."""
