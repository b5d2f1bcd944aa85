"""Static files of the page at /: no build step, no external resources; `protocols/ops.py` sends them."""
