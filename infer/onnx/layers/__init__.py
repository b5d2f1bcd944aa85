"""Quantized layers and attention as ONNX operators, in the form that each target runs fast."""
