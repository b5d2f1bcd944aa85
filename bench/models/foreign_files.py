"""Files of other tools for the models table, written in code: their first bytes, or the names in them."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Maker = Callable[[Path], Path]


class Payload:
    """Object whose pickle is a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def data(name: str, content: bytes) -> Maker:
    """Make a file of these bytes."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def holding(*names: str) -> Maker:
    """Make a folder that holds files of these names."""

    def make(folder: Path) -> Path:
        for name in names:
            path = folder / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        return folder / "model"

    return make


def zipped(name: str, *members: str) -> Maker:
    """Make a zip of members of these names."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / name, "w") as file:
            for member in members:
                file.writestr(member, "x" * 64)
        return folder / name

    return make


def tarred(name: str, *members: str) -> Maker:
    """Make a tar file of members of these names."""

    def make(folder: Path) -> Path:
        with tarfile.open(folder / name, "w") as file:
            for member in members:
                info = tarfile.TarInfo(member)
                info.size = 4
                file.addfile(info, io.BytesIO(b"data"))
        return folder / name

    return make


def field(number: int, content: bytes) -> bytes:
    """Return one protobuf field of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def sklearn_onnx(folder: Path) -> Path:
    """Write a classifier as skl2onnx does: the label as a text, probabilities as a sequence of maps."""
    from onnx import TensorProto, helper, numpy_helper, save

    element = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, element))
    table = helper.make_tensor("names", TensorProto.STRING, [3], [b"no", b"perhaps", b"yes"])
    nodes = [
        helper.make_node("MatMul", ["X", "w"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["scores"], ["index"], axis=1, keepdims=0),
        helper.make_node("Constant", [], ["table"], value=table),
        helper.make_node("Gather", ["table", "index"], ["output_label"]),
        helper.make_node(
            "ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml",
            classlabels_strings=["no", "perhaps", "yes"],
        ),
    ]  # fmt: skip
    outputs = [
        helper.make_tensor_value_info("output_label", TensorProto.STRING, [None]),
        helper.make_value_info("output_probability", maps),
    ]
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 8])]
    weights = [numpy_helper.from_array(np.eye(8, 3, dtype=np.float32), "w")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(folder / "model.onnx"))
    return folder / "model.onnx"


def quantized_onnx(folder: Path) -> Path:
    """Write a product with QuantizeLinear and DequantizeLinear around it."""
    from onnx import TensorProto, helper, numpy_helper, save

    held = {"w": np.ones((8, 8), np.int8), "s": np.float32(0.1), "z": np.int8(0), "u": np.uint8(128)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "u"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "u"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"]),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in "xy"]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


NOISE = bytes(range(200, 250))
NODE = field(1, field(1, b"input") + field(2, b"Placeholder"))
FLATBUFFER = b"\x1c\0\0\0"
FILES: dict[str, Maker] = {
    "OpenVINO .xml": data("model.xml", b'<?xml version="1.0"?><net name="m" version="11"><layers/></net>'),
    "TensorFlow Lite .tflite": data("model.tflite", FLATBUFFER + b"TFL3" + bytes(40)),
    "TensorFlow frozen .pb": data("model.pb", NODE * 3),
    "TensorFlow SavedModel": holding("saved_model.pb"),
    "TensorFlow checkpoint": holding("ckpt-1.index", "ckpt-1.data-00000-of-00001"),
    "TensorRT .engine": data("model.engine", NOISE),
    "TensorRT .plan": data("model.plan", b"ftrt" + NOISE),
    "ExecuTorch .pte": data("model.pte", FLATBUFFER + b"ET12" + bytes(40)),
    "NeMo .nemo": tarred("model.nemo", "./model_config.yaml", "./model_weights.ckpt"),
    "GGUF, cut off": data("model.gguf", b"GGUF\3\0\0\0"),
    "GGML": data("model.bin", b"lmgg" + bytes(16)),
    "Core ML .mlmodel": data("model.mlmodel", b"\x08\x05" + field(2, b"\x0a\0") + b"\xa2\x1f\1\0"),
    "Core ML .mlpackage": holding("Data/com.apple.CoreML/model.mlmodel"),
    "Keras .h5": data("model.h5", b"\x89HDF\r\n\x1a\n"),
    "Keras .keras": zipped("model.keras", "metadata.json", "config.json", "model.weights.h5"),
    "AOTInductor .pt2": zipped("model.pt2", "m/archive_format", "m/data/aotinductor/model/model.so"),
    "NumPy .npz": zipped("model.npz", "a.npy"),
    "scikit-learn pickle": data("model.pkl", b"\x80\x04\x95\0csklearn.svm._classes\nSVC\n\xff"),
    "joblib, compressed": data("model.joblib", b"x\x9c" + NOISE),
    "Flax .msgpack": data("model.msgpack", b"\x81\xa6params\x81\xa1a" + NOISE),
    "JAX Orbax folder": holding("_CHECKPOINT_METADATA", "manifest.ocdbt"),
    "distributed checkpoint": holding(".metadata", "__0_0.distcp"),
    "DeepSpeed checkpoint": holding("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "PEFT adapter folder": holding("adapter_config.json", "adapter_model.safetensors"),
}
