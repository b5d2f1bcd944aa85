"""Rewrites of captured programs: fusion, and packing of weights for the CPU at hand."""
