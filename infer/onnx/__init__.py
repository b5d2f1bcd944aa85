"""Lowering to ONNX, shared by the backends `ort`, `openvino` and `trt`.

`export` writes the file, `layers/` its quantized layers and attention for one target; `ort/` runs it in ONNX Runtime.

Nothing here is imported by the core, and every import of an ONNX library stands inside a function: a machine
without them can still run the other backends.
"""
