"""Kernels of the layout `groupwise`: codes of a checkpoint."""
