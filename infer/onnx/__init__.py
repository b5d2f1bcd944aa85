"""ONNX files, shared by the backends `ort`, `openvino` and `trt`, and ONNX Runtime, which also judges ONNX sources.

`export` writes a program with the rules of a backend for its layers, `source/` quantizes the weights of a file,
`ort_session` opens and runs one.

Every import of an ONNX library stands inside a function: a machine without them can still run the other backends.
"""
