"""ONNX sources, copied into an artifact or with weights in other formats: the names of these."""

from __future__ import annotations

from ...plugins import BackendOption

FORMATS = ("int8", "int8:weight", "fp16")  # that the weights of a file get where its graph stays
AXIS_OPSET = 13  # the first whose DequantizeLinear takes a scale per channel
INT8, MIXED, FINER, FP16 = "int8", "mixed", "finer", "fp16"
OPTION = "weights"  # of the backends that store the weights of a file, and its values
WEIGHTS = BackendOption(
    "format that --quant int8 gives weights of an ONNX file; mixed, finer: fp16 for those that move its outputs most",
    (INT8, MIXED, FINER, FP16),
)
