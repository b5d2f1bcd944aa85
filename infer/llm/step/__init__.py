"""The captured step of a decoder: probed, captured, checked on every schedule, recorded as CUDA graphs."""
