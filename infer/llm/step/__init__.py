"""The captured step of a decoder: made, probed, compared on every schedule, recorded as CUDA graphs."""
