"""Sample inputs for fidelity checks and calibration, from `--data` or shipped beside the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import carried_state, rows
from ...errors import InputError, UsageError
from ...plan import OURS, RANDOM, REQUIRED, Plan
from ...regular_files import is_there
from ...spec import BATCH, CHOICES, DECODER_IDS, DTYPE_NAMES, TEXT_INPUTS, Finding, TensorSpec
from ...weights.file_blocks import raw_bytes
from ..loaded_model import LoadedModel
from ..sources.user_module import UserModule, call_for_tensors, import_file, importable
from . import sample_split
from .sample_files import are_texts, digest_of_files, example_option, list_files, read_files
from .sample_split import MAX_ROWS, Samples

if TYPE_CHECKING:
    from .batch_axes import Runs
    from .fatal_sizes import InputTrials

RANDOM_ROWS = 8
MOST_TRAINING_ROWS = 4096  # of text
PAGE_SIZE = 1000  # of the corners of tokens on a page
TOKENS = ("input_ids", DECODER_IDS)
OURS_NOTE = "checked on inputs of ours: give --data for a claim about yours"
RANDOM_NOTE = "random inputs say nothing about fidelity on real data"


@dataclass(frozen=True)
class ReadRows:
    """Samples by input name, their source and digest; `texts`: they were tokenized here."""

    samples: Samples
    source: str
    digest: str
    texts: bool = False
    ours: bool = False  # made here, since the user gave none


def with_samples(
    plan: Plan,
    loaded: LoadedModel,
    user_module: UserModule | None,
    *,
    calibrates: bool | None = None,
    tried: Callable[[LoadedModel], InputTrials | None] | None = None,
) -> LoadedModel:
    """Return the model with its samples: from `plan.data`, else from the source, else of ours.

    Raises `UsageError` asking for --data where that is `required` and the source has none.

    When the model is quantized, calibration rows are split off: no row both calibrates and judges. `calibrates`:
    whether to split them off (None: where the plan quantizes); a search always does, so that the same rows judge
    all of its trials. More text is read then, and all of it that doesn't judge is for calibration and recovery. `tried`
    makes what runs the model on inputs that it may not take.
    """
    trials = tried(loaded) if tried else None
    try:
        return _with_samples(plan, loaded, user_module, calibrates, trials)
    finally:
        if trials is not None:
            trials.close()


def _with_samples(
    plan: Plan,
    loaded: LoadedModel,
    user_module: UserModule | None,
    calibrates: bool | None,
    trials: InputTrials | None,
) -> LoadedModel:
    runs = None if trials is None else trials.runs
    if runs is not None:
        loaded = _with_axes(plan, loaded, user_module, runs)
    quantizes = _quantizes(plan) if calibrates is None else calibrates
    most = MOST_TRAINING_ROWS if quantizes and _calibrates_with_texts(plan, loaded) else None
    if plan.data is not None and plan.data not in (OURS, REQUIRED):
        read = _read(plan.data, loaded, plan.seed, most)
        why = RANDOM_NOTE if plan.data == RANDOM else read.source
    else:
        read = _shipped_or_ours(plan, loaded, user_module, most, runs)
        why = read.source
    if trials is not None:
        from . import fatal_sizes, inputs_of_ours

        loaded = fatal_sizes.refuse(loaded, read.samples, trials, inputs_of_ours.some)
    if read.ours:
        loaded = loaded.limited(OURS_NOTE)
    count = rows.count(loaded.inputs, read.samples)
    data = Finding("load", "data", count, "rows", f"{why}; sha256 {read.digest}")
    has_more = most is not None and (read.texts or bool(plan.recover))
    samples = sample_split.spread_rows(read.samples, MAX_ROWS, loaded.inputs) if has_more else read.samples
    calibration, training, source = loaded.calibration, loaded.training, read.source
    more = (
        user_module.tensors("calibration_inputs") if user_module and plan.data in (None, REQUIRED) else None
    )
    if more and user_module:
        source = f"{user_module.path}:calibration_inputs"
        calibration = sample_split.exclude_rows(_select(more, loaded, source), samples, loaded.inputs)
    elif quantizes:
        together = max(_together(loaded), loaded.multiples.get(BATCH, 1))
        samples, calibration = sample_split.split(samples, loaded.inputs, together=together)
        if has_more:
            training = sample_split.exclude_rows(read.samples, samples, loaded.inputs)
    seen = training or calibration
    split = sample_split.describe_split(samples, seen, loaded.inputs, source, digest_of(seen))
    return replace(
        loaded,
        samples=samples,
        samples_from=read.source,
        ours=read.ours,
        calibration=calibration,
        training=training,
    ).saying(data, *split)


def _with_axes(plan: Plan, loaded: LoadedModel, user_module: UserModule | None, runs: Runs) -> LoadedModel:
    """Name the batch axes that a file does not name, at the sizes of the user's data where there are any."""
    from . import batch_axes, inputs_of_ours

    if not batch_axes.are_open(loaded):
        return loaded
    loose = replace(loaded, inputs=loaded.loose)
    if plan.data is not None and plan.data not in (OURS, REQUIRED, RANDOM):
        path = Path(plan.data)  # of several files the first: how they are joined is not known yet
        first = str(list_files(path)[0]) if path.is_dir() and list_files(path) else plan.data
        given = _read(first, loose, plan.seed, None).samples
    else:
        shipped = None if plan.data in (OURS, RANDOM) else _shipped(loose, plan, user_module, None)
        given = _select(shipped[0], loose, shipped[1]) if shipped else {}
    if not given:
        return batch_axes.settle(plan, loaded, runs, inputs_of_ours.some)
    sizes = {
        size: have
        for spec in loaded.loose
        if spec.name in given
        for size, have in zip(spec.shape, given[spec.name].shape, strict=True)
        if isinstance(size, str)
    }

    def make(specs: Sequence[TensorSpec], wanted: Mapping[str, int]) -> Samples:
        absent = inputs_of_ours.some([spec for spec in specs if spec.name not in given], wanted)
        return absent | {
            spec.name: spec.with_sizes(given[spec.name], wanted) for spec in specs if spec.name in given
        }

    return batch_axes.settle(plan, loaded, runs, make, sizes)


def _quantizes(plan: Plan) -> bool:
    return plan.quant != "none" or plan.bits is not None or plan.max_drop is not None


def _calibrates_with_texts(plan: Plan, loaded: LoadedModel) -> bool:
    """Tell whether the model takes texts one by one, and more of them than judge it are of use."""
    takes_texts = any(spec.name in TEXT_INPUTS for spec in loaded.inputs) and _together(loaded) == 1
    return takes_texts and (bool(plan.recover) or plan.calibrate != "none")


def _shipped_or_ours(
    plan: Plan,
    loaded: LoadedModel,
    user_module: UserModule | None,
    most: int | None,
    runs: Runs | None,
) -> ReadRows:
    shipped = None if plan.data == OURS else _shipped(loaded, plan, user_module, most)
    if shipped is None and plan.data != REQUIRED:
        from . import inputs_of_ours

        found, kind, texts = inputs_of_ours.make(loaded, plan.seed, most, runs)
        source = f"{kind} of ours"
        samples = _select(found, loaded, source)
        return ReadRows(samples, source, digest_of(samples), texts, ours=True)
    if shipped is None:
        takes = ", ".join(spec.format() for spec in loaded.inputs)
        raise UsageError(
            f"no real inputs to check the result with; the model takes {takes}",
            where="--data",
            hint=f"Give some: {example_option(loaded)}. Without --data, inputs of ours check it",
        )
    found, source, texts = shipped
    samples = _select(found, loaded, source)
    return ReadRows(samples, source, digest_of(samples), texts)


def read_data(
    spec: str, loaded: LoadedModel, *, seed: int = 0, most: int | None = None
) -> tuple[Samples, str, str]:
    """Read `--data`: .npz, .npy, .pt, text, images, a folder of these, `file.py:function`, or "random".

    Of texts and images at most `most` rows are read, spread evenly; by default as many as a judgement needs. Samples
    are batch-first tensors by input name, checked against `loaded.inputs`. Raises `InputError` (a tensor does not fit),
    `SourceError` (the file can't be read) or `UsageError`.
    """
    read = _read(spec, loaded, seed, most)
    return read.samples, read.source, read.digest


def _read(spec: str, loaded: LoadedModel, seed: int, most: int | None) -> ReadRows:
    if spec == RANDOM:
        vocabulary, pad_id = loaded.meta.get("vocab_size"), loaded.meta.get("pad_id")
        rows = RANDOM_ROWS * _together(loaded)
        samples = random_inputs(loaded.inputs, seed, loaded.sizes, vocabulary, pad_id, rows=rows)
        return ReadRows(samples, f"--data random: {RANDOM_NOTE}", digest_of(samples))
    file, _, name = spec.rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return _from_function(Path(file), name, loaded, most)
    path = Path(spec)
    if not is_there(path, error=UsageError):
        raise UsageError(
            f"there is no file or folder {spec}", where="--data", hint=f"Give {example_option(loaded)}"
        )
    files = list_files(path) if path.is_dir() else [path]
    samples, used = read_files(files, loaded, spec, most)
    fitting = _select(samples, loaded, spec)
    return ReadRows(fitting, f"--data {spec}", digest_of_files(used), are_texts(used))


def select_inputs(
    samples: Mapping[str, Tensor], specs: tuple[TensorSpec, ...], where: str, states: Collection[str] = ()
) -> Samples:
    """Select and order the samples by `specs`, cast to their dtypes; a state that is missing is zeros.

    Raises `InputError` for another input that is missing.
    """
    sizes: dict[str, int] = {}
    found: Samples = {}
    for spec in specs:
        if spec.name in states and spec.name not in samples:
            continue
        if spec.name not in samples:
            held = ", ".join(samples) or "nothing"
            raise InputError(
                f"expected input {spec}, got {held}", where=where, hint="Name the arrays as the inputs"
            )
        value = _fit(samples[spec.name], spec)
        spec.check(value, where, sizes)
        found[spec.name] = value
    if not any(value.ndim for value in found.values()) or any(value.numel() == 0 for value in found.values()):
        shown = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
        raise InputError(f"expected at least one row of each input, got {shown or 'no array'}", where=where)
    found |= carried_state.zeros(specs, set(states) - set(found), sizes)
    return {spec.name: found[spec.name] for spec in specs}


def random_inputs(
    specs: tuple[TensorSpec, ...],
    seed: int,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    vocabulary: int | None = None,
    pad_id: int | None = None,
    *,
    rows: int = RANDOM_ROWS,
) -> Samples:
    """Draw normal floats, ones for masks, tokens of the vocabulary, boxes on a page, and 0 or 1 for other integers.

    The batch is `rows`; another symbolic size is 8, or twice its smallest if larger. The padding token is not drawn:
    some models number the positions of the other tokens only.
    """
    known = {
        name: max(RANDOM_ROWS, 2 * low) if low > 1 else RANDOM_ROWS
        for name, (low, _) in (sizes or {}).items()
    }
    known["batch"] = max(rows, known.get("batch", 0))
    generator = torch.Generator().manual_seed(seed)
    samples: Samples = {}
    for spec in specs:
        shape = [known.get(size, RANDOM_ROWS) if isinstance(size, str) else size for size in spec.shape]
        if spec.torch_dtype.is_floating_point:
            samples[spec.name] = torch.randn(shape, generator=generator).to(spec.torch_dtype)
        elif spec.dtype == "bool" or "mask" in spec.name:
            samples[spec.name] = torch.ones(shape, dtype=spec.torch_dtype)
        elif spec.name == "bbox":  # left, top, right, bottom on a page of 1000 x 1000
            corners = torch.randint(0, PAGE_SIZE + 1, (*shape[:-1], 2, 2), generator=generator)
            samples[spec.name] = corners.sort(-2).values.flatten(-2).to(spec.torch_dtype)
        else:
            tokens = vocabulary if vocabulary and spec.name in TOKENS else None
            drawn = torch.randint(0, tokens or 2, shape, generator=generator)
            if tokens and pad_id is not None:
                drawn[drawn == pad_id] = (pad_id + 1) % tokens
            samples[spec.name] = drawn.to(spec.torch_dtype)
    return samples


def _select(samples: Mapping[str, Tensor], loaded: LoadedModel, where: str) -> Samples:
    """Select the inputs of the model; states that are missing are zeros, once it is known what their axes are."""
    outputs = loaded.meta.get("outputs")
    states = carried_state.states_of(loaded.inputs, outputs)
    if loaded.inputs is not loaded.loose:
        return select_inputs(samples, loaded.inputs, where, states)
    absent = {name for name in carried_state.states_of(loaded.inputs, None) if name not in samples}
    return select_inputs(samples, tuple(s for s in loaded.inputs if s.name not in absent), where)


def _together(loaded: LoadedModel) -> int:
    """Return the rows of the samples that are one decision: the choices of a question."""
    return CHOICES if loaded.task == "multiple-choice" else 1


def _fit(value: Tensor, spec: TensorSpec) -> Tensor:
    want, have = spec.torch_dtype, value.dtype
    if have != want and (have.is_floating_point and want.is_floating_point or _whole(have) and _whole(want)):
        value = value.to(want)
    fixed = spec.shape[0] if spec.shape else None
    if isinstance(fixed, int) and not spec.batched and value.ndim and value.shape[0] > fixed:
        value = value[:fixed]
    return value.contiguous()


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _shipped(
    loaded: LoadedModel, plan: Plan, user_module: UserModule | None, most: int | None
) -> tuple[Samples, str, bool] | None:
    """Return samples beside the model, their source, and whether they are texts; None where there are none."""
    if loaded.samples:  # of the program that the module is part of
        return dict(loaded.samples), loaded.samples_from, False
    if user_module is not None:
        found = user_module.tensors("example_inputs")
        return None if found is None else (found, f"{user_module.path}:example_inputs", False)
    folder = Path(plan.source)
    for name in ("samples.npz", "samples.txt"):
        if loaded.kind == "huggingface" and (folder / name).is_file():
            samples, used = read_files([folder / name], loaded, name, most)
            return samples, str(folder / name), are_texts(used)
    return None


def _from_function(path: Path, name: str, loaded: LoadedModel, most: int | None) -> ReadRows:
    call = getattr(import_file(path), name, None)
    where = f"{path}:{name}"
    if not callable(call):
        raise UsageError(f"{path} has no function {name!r}", where="--data")
    with importable(path.parent):
        found = call()
        texts = isinstance(found, list) and bool(found) and all(isinstance(item, str) for item in found)
        if texts:
            from .text_samples import tokenize

            found = tokenize(found, loaded, most)
        samples = _select(call_for_tensors(lambda: found, where), loaded, where)
    return ReadRows(samples, f"--data {where}", digest_of(samples), texts)


def digest_of(samples: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in samples.items():
        digest.update(f"{name} {DTYPE_NAMES[value.dtype]} {list(value.shape)}".encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()
