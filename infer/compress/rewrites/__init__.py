"""Rewrites of the float model before it is quantized: norms folded, recurrent layers split."""
