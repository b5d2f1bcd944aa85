"""ONNX files as sources: copied, or their layers quantized in place."""
