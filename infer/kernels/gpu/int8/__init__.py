"""Linear layers with int8 weights: `linear_int8`, `_static` and `_weight` on a GPU."""
