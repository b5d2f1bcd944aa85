"""Linear layers whose weights are codes of a table: `linear_lut` on a GPU."""
