"""Lowering to ONNX, shared by the backends `ort` and `trt`.

Nothing here is imported by the core, and every import of an ONNX library stands inside a function: a machine
without them can still run the other backends.
"""
