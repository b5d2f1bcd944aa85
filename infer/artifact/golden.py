"""Golden inputs: a few rows that an artifact stores with their outputs, for its self-test.

They are copies of the first two rows of the user's data, or, where none may leave with the artifact, synthetic rows.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import rows
from ..errors import ArtifactError, InputError, SourceError, UsageError
from ..plan import INVENTED, RANDOM, REQUIRED, Plan
from ..spec import DTYPE_NAMES, Finding, TensorSpec
from ..weights.safetensors_file import open_safetensors, read_header
from .model_info import GOLDEN_INPUTS
from .store import Manifest

ROWS = 2
TOKENS = 16  # of each row of a language model; logits of whole windows would outweigh the model
LARGEST_ELEMENT = 16  # bytes, of complex128
INPUTS, OUTPUTS = GOLDEN_INPUTS, "golden/outputs.safetensors"
SYNTHETIC = "synthetic inputs (--no-golden)"
Tensors = dict[str, Tensor]
Fill = Callable[[tuple[int, ...], torch.Generator], Tensor]

# Tried in this order until the float model gives finite numbers.
FLOATS: tuple[Fill, ...] = (
    lambda shape, generator: torch.randn(shape, generator=generator),
    lambda shape, generator: torch.rand(shape, generator=generator),
    lambda shape, generator: torch.ones(shape),
)


def record(
    reference: Any,
    runner: Any,
    specs: tuple[TensorSpec, ...],
    inputs: Mapping[str, Tensor],
    *,
    task: str = "tensors",
    synthetic: bool = False,
    vocabulary: int = 2,
    seed: int = 0,
    least: int = ROWS,
) -> dict[str, Tensors]:
    """Run the float and the optimized runner on a few rows; return copies of `inputs`, `float_outputs` and `outputs`.

    `synthetic` takes random rows of the same shape instead, token ids below `vocabulary`.
    """
    few = rows_of(specs, inputs, task, least)
    if synthetic:
        few = _made_up(reference, specs, few, vocabulary, seed)
    outputs = {"float_outputs": reference.run(few), "outputs": runner.run(few)}
    return {"inputs": few} | {
        key: {name: _copy(value) for name, value in values.items()} for key, values in outputs.items()
    }


def rows_of(
    specs: tuple[TensorSpec, ...], inputs: Mapping[str, Tensor], task: str, least: int = ROWS
) -> Tensors:
    """Copy the first rows, as few as the model takes; a view would be stored with everything that its memory holds."""
    few = rows.cut(specs, inputs, 0, max(ROWS, least))
    if task == "text-generation":
        few = {name: v if v.is_floating_point() else v[:, :TOKENS] for name, v in few.items()}
    return {name: _copy(value) for name, value in few.items()}


def _copy(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _made_up(
    reference: Any, specs: tuple[TensorSpec, ...], like: Mapping[str, Tensor], vocabulary: int, seed: int
) -> Tensors:
    for floats in FLOATS:
        made = {spec.name: _random(spec, like[spec.name], floats, vocabulary, seed) for spec in specs}
        outputs = reference.run(made).values()
        if all(bool(torch.isfinite(value).all()) for value in outputs if value.is_floating_point()):
            return made
    raise UsageError(
        "the float model gives NaN or infinity on synthetic inputs, so an artifact without rows of --data could not "
        "test itself",
        where="--no-golden",
        hint="Leave --no-golden out, and give --data whose first two rows may be published",
    )


def _random(spec: TensorSpec, like: Tensor, floats: Fill, vocabulary: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(like.shape)
    if like.is_floating_point():
        return floats(shape, generator).to(like.dtype)
    if like.dtype == torch.bool or "mask" in spec.name:
        return torch.ones(shape, dtype=like.dtype)
    high = vocabulary if spec.name.endswith("input_ids") else 2
    return torch.randint(0, high, shape, generator=generator).to(like.dtype)


def read_inputs(folder: Path, specs: tuple[TensorSpec, ...]) -> Tensors:
    """Read the golden inputs; raise `ArtifactError` unless they match `specs`."""
    found, sizes = _read(folder / INPUTS, [spec.name for spec in specs]), dict[str, int]()
    for spec in specs:
        try:
            spec.check(found[spec.name], sizes=sizes)
        except InputError as error:
            raise ArtifactError(error.message, where=str(folder / INPUTS)) from error
        if found[spec.name].numel() == 0:
            raise ArtifactError(f"{spec.name!r} holds no values", where=str(folder / INPUTS))
    return found


def read_outputs(folder: Path, names: Iterable[str]) -> Tensors:
    """Read the golden outputs; raise `ArtifactError` unless they are those of `names`."""
    return _read(folder / OUTPUTS, names)


def _read(path: Path, names: Iterable[str]) -> Tensors:
    wanted = sorted(names)
    try:
        weights = open_safetensors(path).weights
        held = sorted(weights)
        found = {name: weights[name].read() for name in wanted if name in held}
    except (SourceError, OSError) as error:
        said = error.message if isinstance(error, SourceError) else str(error)
        raise ArtifactError(f"the golden tensors can't be read: {said}", where=str(path)) from error
    if not wanted or held != wanted:
        why = (
            f"expected golden tensors {', '.join(wanted) or 'of some name'}, got {', '.join(held) or 'none'}"
        )
        raise ArtifactError(why[:400], where=str(path))
    return found


def finding(plan: Plan, kept: Mapping[str, Mapping[str, Tensor]], source: str) -> Finding:
    """Report the number and source of the rows stored in the artifact."""
    inputs = kept.get("inputs", {})
    rows = max((len(value) for value in inputs.values() if value.dim()), default=0)
    if not plan.golden:
        return Finding(
            "publish", "golden inputs", rows, "rows", why=f"{SYNTHETIC}: the artifact holds no row of data"
        )
    why = f"copies of rows from {source} stay in the artifact for its self-test; --no-golden stores none"
    return Finding("publish", "golden inputs", rows, "rows", why=why)


def stored_user_data(folder: Path, manifest: Manifest) -> list[str]:
    """Describe each piece of user data in an artifact, from file headers alone."""
    lines, source = [], _source(manifest)
    if (folder / INPUTS).is_file():
        extents, _ = read_header(folder / INPUTS)
        shapes = ", ".join(
            f"{n} {DTYPE_NAMES.get(p.dtype, p.dtype)} {list(p.shape)}" for n, p in extents.items()
        )
        rows = max((extent.shape[0] for extent in extents.values() if extent.shape), default=0)
        whose = f"{rows} rows of inputs from {source}" if manifest.plan.golden else SYNTHETIC
        lines.append(f"{whose}: {shapes}; and the outputs for them")
    if "generation" not in manifest.meta and (size := _example_bytes(folder / "graph.pt2")):
        lines.append(
            f"{size} bytes of example inputs in graph.pt2, as older versions of infer stored them: make it again"
        )
    if manifest.plan.data not in (None, *INVENTED, REQUIRED):
        lines.append(f"the path of --data, {manifest.plan.data}, and its sha256")
    return lines


def _source(manifest: Manifest) -> str:
    if manifest.plan.data == RANDOM:
        return "--data random"
    return manifest.samples_from or "the data it was checked with"


def _example_bytes(program: Path) -> int:
    """Return the bytes of a graph.pt2's example inputs beyond one element each; 0 when unknown."""
    try:
        with zipfile.ZipFile(program) as outer:
            name = next((n for n in outer.namelist() if n.endswith("/data/sample_inputs/model.pt")), None)
            if name is None:
                return 0
            with outer.open(name) as member, zipfile.ZipFile(member) as inner:
                stored = [info.file_size for info in inner.infolist() if "/data/" in info.filename]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return 0
    return sum(size for size in stored if size > LARGEST_ELEMENT)
