"""Kernels of the layout `lut` and of its 4-bit codes in the order of tensor-core fragments."""
