"""A module in memory as the source of a run: its calls become inputs, samples and symbolic sizes."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import rows
from ..errors import NotUsableError, UsageError
from ..graph.capture import wrapped
from ..load.input_specs import SIDE, resolve_inputs
from ..load.loaded_model import LoadedModel
from ..load.module_copies import copy_structure
from ..load.samples import inputs_of_ours
from ..load.samples.read_samples import digest_of
from ..load.sources.python_sources import module_in_memory
from ..plan import Plan
from ..spec import BATCH, Finding
from ..weights.file_blocks import raw_bytes
from .call_structure import CallReader, Structure, UnsupportedValueError, take_apart
from .symbolic_sizes import find_sizes

HALF = (torch.float16, torch.bfloat16)
MOST_ROWS = 256  # of the samples


@dataclass(frozen=True)
class LiveSource:
    """Calls of one structure of a module, and the module as a source of tensors in and tensors out.

    `float_module` is a copy of the module on the CPU in float32, which judges. `calls`: tensors of each, in the order
    of `structure.names`, for that copy. `returned` and `output_dtypes`: what the module returns. `loaded` is what
    `infer.load` returns of a file.
    """

    module: nn.Module
    float_module: nn.Module
    structure: Structure
    calls: tuple[tuple[Tensor, ...], ...]
    returned: Structure
    output_dtypes: tuple[torch.dtype, ...]
    loaded: LoadedModel

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def digest(self) -> str:
        """Digest of weights, of the code of every kind of layer, of the calls' structure and of the samples."""
        found = hashlib.sha256(f"{self.structure.key} {self.loaded.inputs} {self.loaded.sizes}".encode())
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(raw_bytes(tensor.detach().cpu().contiguous()))
        for name, layer in self.module.named_modules():
            found.update(f"{name} {type(layer).__qualname__} {layer.extra_repr()}".encode())
        for kind in dict.fromkeys(type(layer) for layer in self.module.modules()):
            found.update(_code_of(kind).encode())
        found.update(digest_of(self.loaded.samples).encode())
        return found.hexdigest()


def _code_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made by a program: the check on the user's calls tells another model
        return kind.__qualname__


def live_source(
    module: nn.Module, plan: Plan, structure: Structure, calls: Sequence[Sequence[Tensor]], origin: str
) -> LiveSource:
    """Make the source of a run from calls of one structure; `origin` says where they are from.

    The module keeps its weights, device, dtype and mode: a copy of its layers, which shares them, is captured. Raises
    `UsageError` for what it returns besides tensors and constants.
    """
    own = [tensor.clone() for tensor in calls[0]]
    first, named = CallReader(module).arguments(structure, own)
    with torch.no_grad():
        answer = module(*first, **named)
    try:
        returned, outputs = take_apart(answer, "output")
    except UnsupportedValueError as error:
        hint = "Give calls that return tensors and constants alone (of transformers: use_cache=False)"
        raise UsageError(f"{type(module).__name__}: {error.message}", hint=hint) from error
    for name, given, after in zip(structure.names, calls[0], own, strict=True):
        if not torch.equal(given.nan_to_num(), after.nan_to_num()):
            raise NotUsableError(
                f"{type(module).__name__} writes into its argument {name}, which an artifact does not",
                hint="Let it return what it computes",
            )
    if not outputs:
        raise UsageError(f"{type(module).__name__} returns no tensor")
    float_module = _float_copy(module)
    judge, flat = (_flat_module(layers, structure) for layers in (float_module, copy_structure(float_module)))
    taken = [tuple(_on_cpu(tensor) for tensor in call) for call in calls]
    sizes = find_sizes(structure.names, taken, lambda tensors: _run(judge, structure, tensors))
    loaded = replace(
        module_in_memory(
            "module in memory", flat, lambda: _flat_module(copy_structure(float_module), structure), None
        ),
        inputs=sizes.inputs,
        outputs=tuple(f"{name}_out" if name in structure.names else name for name in returned.names),
        called=judge,
        sizes={**sizes.bounds, **({BATCH: (1, plan.max_batch)} if rows.have_rows(sizes.inputs) else {})},
        samples=_samples(taken, structure, sizes.inputs) if origin else {},
        samples_from=origin,
        findings=tuple(_findings(module, calls)),
    )
    dtypes = tuple(tensor.dtype for tensor in outputs)
    return LiveSource(module, float_module, structure, tuple(taken), returned, dtypes, loaded)


def without_calls(module: nn.Module, plan: Plan) -> tuple[Structure, list[list[Tensor]]]:
    """Propose calls by the first layer of a model whose `forward` takes one tensor; raise `UsageError` of another."""
    (spec, *others), _ = resolve_inputs(plan, (), module)
    if others:
        names = ", ".join(s.name for s in (spec, *others))
        raise UsageError(
            f"the model takes {names}, and nothing tells what they are",
            where="data",
            hint="Give calls of it: infer.compile(model, data=...)",
        )
    calls = []
    for length in (SIDE, 2 * SIDE):  # of a size that the layers leave open
        sizes = {size: length for size in spec.shape if isinstance(size, str)} | {BATCH: 2}
        structure, tensors = CallReader(module).read((inputs_of_ours.some([spec], sizes)[spec.name],), {})
        calls.append(tensors)
    return structure, calls


def _flat_module(module: nn.Module, structure: Structure) -> nn.Module:
    """Wrap `module`: tensors by the names of `structure` in, the tuple of its output tensors back."""
    reader = CallReader(module)

    def call(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        positional, named = reader.arguments(structure, [tensors[name] for name in structure.names])
        _, outputs = take_apart(model(*positional, **named), "output")
        return tuple(outputs)

    return wrapped(type(module).__name__, module, structure.names, call)


def _float_copy(module: nn.Module) -> nn.Module:
    """Copy the layers of a module for a capture on the CPU in float32; values that are so already stay shared."""
    try:
        copied = copy_structure(module).eval().requires_grad_(False)
    except Exception as error:
        raise NotUsableError(
            f"the layers of {type(module).__name__} can't be copied: {error}",
            hint="Keep what is no part of the model (locks, files, sockets) out of its attributes",
        ) from error
    return copied.cpu().float() if any(p.dtype in HALF for p in copied.parameters()) else copied.cpu()


def _on_cpu(tensor: Tensor) -> Tensor:
    moved = tensor.detach().cpu()
    return moved.float() if moved.dtype in HALF else moved


def _run(flat: nn.Module, structure: Structure, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return flat(**dict(zip(structure.names, tensors, strict=True)))


def _samples(calls: Sequence[Sequence[Tensor]], structure: Structure, specs: Sequence) -> dict[str, Tensor]:
    """Join the calls of one shape apart from the batch: those that have the most rows together."""
    groups: dict[tuple, list[dict[str, Tensor]]] = {}
    for call in calls:
        named = dict(zip(structure.names, call, strict=True))
        shapes = tuple(
            size
            for spec in specs
            for axis, size in enumerate(named[spec.name].shape)
            if axis != spec.batch_axis
        )
        shared = tuple(
            hashlib.sha256(raw_bytes(named[spec.name].contiguous())).digest()
            for spec in specs
            if not spec.batched
        )
        groups.setdefault((shapes, shared), []).append(named)
    together = max(groups.values(), key=lambda group: sum(rows.count(specs, named) for named in group))
    joined = rows.join(specs, together) if rows.have_rows(specs) else together[0]
    return {name: value.contiguous() for name, value in rows.cut(specs, joined, 0, MOST_ROWS).items()}


def _findings(module: nn.Module, calls: Sequence[Sequence[Tensor]]) -> list[Finding]:
    found = [Finding("load", "calls", len(calls), why="of the module, as the program makes them")]
    halves = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dtype in HALF}
    if halves:
        why = f"the module computes in {', '.join(sorted(halves))}; its weights are compared in float32"
        found.append(Finding("load", "compute dtype", "float32", why=why))
    return found
