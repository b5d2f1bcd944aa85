"""ONNX graphs as torch modules: the importer.

`import_onnx` gives a module that the usual capture turns into a program, so that an ONNX file has the formats and
backends of a torch source. One function for each operator, in a file for each kind; `operators.py` is the table.
"""

from . import (  # noqa: F401 - each enters its operators into the table
    attention,
    control_flow,
    convolution,
    detection,
    elementwise,
    quantized,
    recurrent,
    reductions,
    resize,
    sequences,
    shapes,
    signal,
    sizes,
)
from .program import NotImportedError, OnnxProgram, from_proto, import_onnx

__all__ = ["NotImportedError", "OnnxProgram", "from_proto", "import_onnx"]
