"""Quantized checkpoints, read as decoded float weights.

`quantization_config` of config.json names the method; each has a file here that finds its tensors and decodes rows.
"""
