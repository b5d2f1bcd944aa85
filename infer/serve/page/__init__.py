"""Static files of the page at /: no build step, no external resources; `api/ops.py` sends them."""
