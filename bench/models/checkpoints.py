"""Checkpoints of the models table: files and folders as they lie around, and the sentence that each gets.

One column: opened, with a remark on what was done to the file, or refused with the way out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from bench.models import diffusers_folders
from bench.models.checks import REFUSED, Cell, Cells, attempt
from infer.errors import InferError
from infer.load import fill, load
from infer.plan import Plan
from tests.support.foreign_files import FOREIGN as CASES
from tests.support.foreign_files import Maker, packed, text
from tests.support.foreign_files import folder as folder_of
from tests.support.openvino_files import write_ir

TITLE = "Checkpoints"
COLUMNS = ("opens",)
NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""
State = dict[str, torch.Tensor]
X = torch.linspace(-1, 1, 24).view(3, 8)


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row."""
    yield from ENTRIES[name](folder)


def model() -> nn.Module:
    """Build the model whose weights the checkpoints hold."""
    space: dict[str, Any] = {}
    exec(NET, space)  # noqa: S102
    return space["build"]().eval()  # type: ignore[no-any-return]


def opened(source: Path, expected: torch.Tensor | None, **options: Any) -> str:
    """Open a source, compare its outputs, and return what was said of the file."""
    loaded = load(Plan(source=str(source), data="random", **options))
    fill(loaded)
    if expected is not None and loaded.module is not None:
        with torch.no_grad():
            got = loaded.module(**{loaded.inputs[0].name: X})
        assert torch.equal(got, expected), "other outputs than the model that was saved"
    notes = [f for f in loaded.findings if f.what in ("checkpoint", "outputs", "quantized already")]
    notes += [f for f in loaded.findings if f.what == "input proposed" and "array" in f.why]
    return "; ".join(str(f.value) if f.what == "checkpoint" else f.why for f in notes)


def sentences(check: Callable[[], str | None], folder: Path) -> Cell:
    """Run a check; a refusal keeps its hint, the way out."""

    def whole() -> str | None:
        try:
            return check()
        except InferError as error:
            refusal.append(error)
            raise

    refusal: list[InferError] = []
    cell = attempt(whole)
    said = re.sub(r" - at \S+?\. ", ". ", str(refusal[0])) if refusal else cell.why
    return Cell(
        cell.outcome, re.sub(r"\s+", " ", said.replace(f"{folder}/", "").replace(str(folder), "FOLDER"))
    )


def checkpoint(wrap: Callable[[State], Any], **options: Any) -> Callable[[Path], Cells]:
    """Make the table row of a file that torch.save wrote with a state dict in it; `--model` builds the model."""

    def cells(folder: Path) -> Cells:
        (folder / "net.py").write_text(NET)
        torch.save(wrap(dict(model().state_dict())), folder / "model.ckpt")
        expected = model()(X).detach()
        check = lambda: opened(folder / "model.ckpt", expected, model=f"{folder}/net.py:build", **options)  # noqa: E731
        yield "opens", sentences(check, folder)

    return cells


def foreign(make: Callable[[Path], Path]) -> Callable[[Path], Cells]:
    """Make a row of a file of another tool: it has to be refused by name, with the way out."""

    def cells(folder: Path) -> Cells:
        source = make(folder)
        cell = sentences(lambda: opened(source, None), folder)
        assert cell.outcome == REFUSED, "expected a refusal"
        yield "opens", cell

    return cells


def huggingface(change: Callable[[Path], Path]) -> Callable[[Path], Cells]:
    """Make a row of a transformers folder; `change` returns the source in it."""

    def cells(folder: Path) -> Cells:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            architectures=["BertModel"],
        )  # fmt: skip
        made = BertModel(config).eval()
        made.save_pretrained(folder, max_shard_size="6KB")
        torch.save(made.state_dict(), folder / "pytorch_model.bin")
        source = change(folder)
        yield "opens", sentences(lambda: opened(source, None), folder)

    return cells


def onnx_file(make: Callable[[Path], Path]) -> Callable[[Path], Cells]:
    """Make a row of an ONNX model of another converter."""

    def cells(folder: Path) -> Cells:
        source = make(folder)
        yield "opens", sentences(lambda: opened(source, None), folder)

    return cells


def prefixed(prefix: str, state: State) -> State:
    """Return the state dict with every name after a prefix."""
    return {prefix + name: value for name, value in state.items()}


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


def openvino_ir(folder: Path) -> Path:
    """Write an OpenVINO IR, and return its XML."""
    write_ir(folder / "model.xml")
    return folder / "model.xml"


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


def script(folder: Path) -> Cells:
    """Make the row of TorchScript whose input is told by the data."""
    torch.jit.script(model()).save(str(folder / "model.pt"))
    np.save(folder / "x.npy", X.numpy())

    def check() -> str:
        loaded = load(Plan(source=str(folder / "model.pt"), data=str(folder / "x.npy"), trust_code=True))
        return next(f"{f.value} {f.why}" for f in loaded.findings if f.what == "input proposed")

    yield "opens", sentences(check, folder)


def without_safetensors(folder: Path) -> Path:
    """Leave the pickled weights alone in a folder."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return folder


def whole_file(folder: Path) -> Path:
    """Put the weights in one safetensors file, and return that file."""
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    without_safetensors(folder)
    save_file({name: value.clone() for name, value in state.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


class Payload:
    """Object whose pickle is a call of `os.system`."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def pickled_code(folder: Path) -> Path:
    """Write a pickle whose loading would run a command."""
    (folder / "model.pt").unlink(missing_ok=True)
    torch.save({"a": torch.ones(2), "b": Payload()}, folder / "model.pt")
    return folder / "model.pt"


def index_alone(folder: Path) -> Path:
    """Write the index of shards that are not there."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    return path


def diffusers_model(name: str) -> Callable[[Path], Cells]:
    """Make the row of one model of a pipeline of diffusers."""

    def cells(folder: Path) -> Cells:
        diffusers_folders.write_pipeline(folder)
        yield "opens", sentences(lambda: diffusers_folders.open_model(folder, name), folder)

    return cells


NOISE = bytes(range(200, 250))
# Title of the row → the name that the file has, and what is in it.
FOREIGN: dict[str, tuple[str, Maker]] = {
    "TensorFlow Lite .tflite": ("model.tflite", CASES["tflite"][0]),
    "TensorFlow frozen .pb": ("model.pb", CASES["frozen graph"][0]),
    "TensorFlow SavedModel": ("model", CASES["saved model folder"][0]),
    "TensorFlow checkpoint": ("model", CASES["tensorflow folder"][0]),
    "TensorRT .engine": ("model.engine", text(NOISE)),
    "TensorRT .plan": ("model.plan", CASES["engine"][0]),
    "ExecuTorch .pte": ("model.pte", CASES["pte"][0]),
    "NeMo .nemo": ("model.nemo", CASES["nemo"][0]),
    "GGUF, cut off": ("model.gguf", text(b"GGUF\3\0\0\0")),
    "GGML": ("model.bin", CASES["ggml"][0]),
    "Core ML .mlmodel": ("model.mlmodel", CASES["core ml"][0]),
    "Core ML .mlpackage": ("model", folder_of("Data/com.apple.CoreML/model.mlmodel")),
    "Keras .h5": ("model.h5", CASES["hdf5"][0]),
    "Keras .keras": ("model.keras", CASES["keras"][0]),
    "AOTInductor .pt2": ("model.pt2", CASES["aoti"][0]),
    "NumPy .npz": ("model.npz", packed("a.npy")),
    "scikit-learn pickle": ("model.pkl", CASES["sklearn"][0]),
    "joblib, compressed": ("model.joblib", CASES["joblib packed"][0]),
    "Flax .msgpack": ("model.msgpack", CASES["flax"][0]),
    "JAX Orbax folder": ("model", CASES["orbax"][0]),
    "distributed checkpoint": ("model", CASES["dcp"][0]),
    "DeepSpeed checkpoint": ("model", CASES["deepspeed"][0]),
    "PEFT adapter folder": ("model", CASES["lora folder"][0]),
}


def written(name: str, make: Maker) -> Callable[[Path], Path]:
    """Return what writes a file of another tool into a folder."""

    def write(folder: Path) -> Path:
        make(folder / name)
        return folder / name

    return write


ENTRIES: dict[str, Callable[[Path], Cells]] = {
    "state dict": checkpoint(lambda sd: sd),
    "Lightning .ckpt": checkpoint(lambda sd: {"state_dict": prefixed("net.", sd), "epoch": 3}),
    "Lightning .ckpt with a loss": checkpoint(
        lambda sd: {"state_dict": prefixed("net.", sd) | {"loss.weight": torch.ones(4)}}
    ),
    "the same, --key net": checkpoint(
        lambda sd: {"state_dict": prefixed("net.", sd) | {"loss.weight": torch.ones(4)}}, key="net"
    ),
    "the same, --ignore-keys 'loss.*'": checkpoint(
        lambda sd: {"state_dict": prefixed("net.", sd) | {"loss.weight": torch.ones(4)}},
        ignore_keys=("loss.*",),
    ),
    "torch.compile": checkpoint(lambda sd: prefixed("_orig_mod.", sd)),
    "DistributedDataParallel": checkpoint(lambda sd: prefixed("module.", sd)),
    "FSDP": checkpoint(lambda sd: prefixed("_fsdp_wrapped_module.", sd)),
    "generator and discriminator": checkpoint(lambda sd: {"G": sd, "D": prefixed("d.", sd)}),
    "the same, --key G": checkpoint(lambda sd: {"G": sd, "D": prefixed("d.", sd)}, key="G"),
    "weights and their average, --key ema": checkpoint(lambda sd: {"model": sd, "ema": sd}, key="ema"),
    "arguments and NumPy scalars beside": checkpoint(
        lambda sd: {"model": sd, "args": argparse.Namespace(lr=0.1), "loss": np.float64(0.5)}
    ),
    "a layer more than the model has": checkpoint(lambda sd: sd | {"aux.weight": torch.ones(2)}),
    "another model's": checkpoint(lambda sd: {f"layer{i}": value for i, value in enumerate(sd.values())}),
    "TorchScript with --data of one array": script,
    "code in a pickle": foreign(pickled_code),
    "Hugging Face, safetensors in shards": huggingface(lambda folder: folder),
    "its model.safetensors.index.json": huggingface(lambda folder: folder / "model.safetensors.index.json"),
    "one file of it, model.safetensors": huggingface(whole_file),
    "Hugging Face, pytorch_model.bin": huggingface(without_safetensors),
    "an index without its shards": foreign(index_alone),
    "ONNX of scikit-learn": onnx_file(sklearn_onnx),
    "ONNX with QuantizeLinear": onnx_file(quantized_onnx),
    "OpenVINO .xml": onnx_file(openvino_ir),
    **{title: foreign(written(*file)) for title, file in FOREIGN.items()},
    "diffusers folder": foreign(diffusers_folders.write_pipeline),
    **{f"its {name}": diffusers_model(name) for name in ("unet", "vae", "text_encoder")},
}
