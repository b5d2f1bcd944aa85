"""Recovery: the float original teaches its quantized copy, without labels; formats and sizes stay."""
