"""Storage of graphs: graph.json, graph.pt2 without weights, and weights/model.safetensors.

Every backend maps the same weights file, and no tensor is stored twice.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import attention  # noqa: F401 - programs call the operator of attention
from ..errors import ArtifactError
from ..library_errors import quiet
from . import devices
from .program import ENCODER, Graph, Signature, TorchGraph

WEIGHTS = "weights/model.safetensors"
PROGRAM = "graph.pt2"
SIGNATURE = "graph.json"


def save(graph: Graph, folder: Path) -> None:
    """Write graph.json, graph.pt2 (hollow) and weights/model.safetensors into `folder`; a shared tensor once.

    Of an ONNX graph only graph.json is written here; its backend carries the model file. Each of `graph.parts` goes
    into a folder of its own.
    """
    for name, part in graph.parts.items():
        (folder / name).mkdir(exist_ok=True)
        save(part, folder / name)
    signature = Signature(graph.inputs, graph.outputs, dict(graph.sizes), graph.task, dict(graph.multiples))
    (folder / SIGNATURE).write_bytes(msgspec.json.format(msgspec.json.encode(signature), indent=1))
    if not isinstance(graph, TorchGraph):
        return
    program = graph.program
    (folder / "weights").mkdir(exist_ok=True)
    tensors, aliases = _unique({**program.state_dict, **program.constants})
    save_file(tensors, folder / WEIGHTS, metadata={"aliases": json.dumps(aliases, sort_keys=True)})
    state, constants, examples = program._state_dict, program._constants, program._example_inputs
    program._state_dict = {name: _without_data(value) for name, value in state.items()}
    program._constants = {n: _without_data(v) if isinstance(v, Tensor) else v for n, v in constants.items()}
    program._example_inputs = _examples_without_data(examples)
    try:
        with quiet():
            written = io.BytesIO()  # torch ends the process where a disk is full
            torch.export.save(program, written)
            (folder / PROGRAM).write_bytes(written.getbuffer())
    finally:
        program._state_dict, program._constants, program._example_inputs = state, constants, examples


def _unique(tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    seen: dict[tuple[Any, ...], str] = {}
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            continue
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        if key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        dense = value.detach().contiguous()
        whole = dense.untyped_storage().nbytes() == dense.numel() * dense.element_size()
        unique[name] = dense if whole else dense.clone()
    return unique, aliases


def _without_data(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype over one stored element, so that the file holds no weights."""
    # torch.export.save can not store an empty view of a storage that is not.
    zero = torch.zeros((), dtype=tensor.dtype)
    hollow = zero.expand(tensor.shape) if tensor.numel() else zero.new_empty(tensor.shape)
    return nn.Parameter(hollow, requires_grad=False) if isinstance(tensor, nn.Parameter) else hollow


def _examples_without_data(examples: Any) -> Any:
    return pytree.tree_map_only(Tensor, _without_data, examples)


def load_weights(folder: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Map every weight and constant from the file, by name; aliases share one tensor."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt", device=device) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    except OSError as error:
        raise ArtifactError(f"the weights can't be read: {error}", where=str(path)) from error
    return tensors | {name: tensors[target] for name, target in aliases.items()}


def load_signature(folder: Path) -> Signature:
    """Read graph.json; raise `ArtifactError` when it can't be read."""
    path = folder / SIGNATURE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Signature)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"the graph's signature can't be read: {error}", where=str(path)) from error


def load(folder: Path, device: str = "cpu") -> TorchGraph:
    """Load the graph that `save` wrote, weights mapped, moved to `device`.

    Runs code of graph.pt2: the caller has established trust.
    """
    signature = load_signature(folder)
    with quiet():
        program = torch.export.load(folder / PROGRAM)
    weights = load_weights(folder, device)
    program._state_dict = {
        name: nn.Parameter(weights[name], requires_grad=False)
        if isinstance(value, nn.Parameter)
        else weights[name]
        for name, value in program._state_dict.items()
    }
    program._constants = {name: weights.get(name, value) for name, value in program._constants.items()}
    program._example_inputs = pytree.tree_map_only(Tensor, Tensor.contiguous, program.example_inputs)
    if device != "cpu":
        program = devices.moved(program, device)
    has_encoder = (folder / ENCODER / PROGRAM).exists()
    return TorchGraph(
        *(signature.inputs, signature.outputs, {}, signature.sizes),
        program=program,
        task=signature.task,
        multiples=signature.multiples,
        parts={ENCODER: load(folder / ENCODER, device)} if has_encoder else {},
    )
