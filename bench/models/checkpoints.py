"""Checkpoints of the models table: files and folders as they lie around, and the sentence that each gets.

One column: opened, with a remark on what was done to the file, or refused with the way out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from bench.models import diffusers_folders, foreign_files
from bench.models.checks import REFUSED, Cell, Cells, attempt
from infer.errors import InferError
from infer.load import fill, load
from infer.plan import Plan

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


def pickled_code(folder: Path) -> Path:
    """Write a pickle whose loading would run a command."""
    (folder / "model.pt").unlink(missing_ok=True)
    torch.save({"a": torch.ones(2), "b": foreign_files.Payload("true")}, folder / "model.pt")
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
    "ONNX of scikit-learn": onnx_file(foreign_files.sklearn_onnx),
    "ONNX with QuantizeLinear": onnx_file(foreign_files.quantized_onnx),
    **{name: foreign(make) for name, make in foreign_files.FILES.items()},
    "diffusers folder": foreign(diffusers_folders.write_pipeline),
    **{f"its {name}": diffusers_model(name) for name in ("unet", "vae", "text_encoder")},
}
