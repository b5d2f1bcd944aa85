"""Match of a checkpoint's tensor names with a model's: wrappers' prefixes, sub-dictionaries, names to ignore.

A name is never guessed: a way of renaming counts only where every tensor of the model then has its own of the same
shape and none is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from ...errors import UsageError
from ...weights import Checkpoint
from ..weight_loading.meta_model import CheckpointMatch, match_checkpoint
from ..weight_loading.tied_weights import take_last

# Attributes in which DataParallel, torch.compile, FSDP, activation checkpointing and Lightning keep the wrapped module.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# Counters that are no weights: of torch.optim.swa_utils.AveragedModel.
COUNTERS = ("n_averaged",)
# Read in training only; checkpoints of torch before 0.4.1 lack it.
TRAINING_ONLY = ".num_batches_tracked"
Names = Mapping[str, str]  # name as the model would have it → name in the checkpoint


def fit_names(
    module: nn.Module, checkpoint: Checkpoint, where: str, *, key: str = "", ignore: Iterable[str] = ()
) -> tuple[CheckpointMatch, list[str]]:
    """Match the model with the checkpoint by the first way of naming that fits; return a note for each step taken.

    `key` keeps the names that begin with it and a dot, `ignore` lists globs of names to leave out. Raises `UsageError`
    for a key or a glob that nothing has, and `SourceError` listing what is missing, unexpected or of another shape.
    """
    names, notes = _selected(list(checkpoint), where, key, tuple(ignore))
    wanted = [name for name, value in module.state_dict(keep_vars=True).items() if hasattr(value, "shape")]
    tried: list[CheckpointMatch] = []
    for renamed, said in _renamings(names, wanted):
        fit = match_checkpoint(module, checkpoint, names=renamed)
        if _exact(fit):
            return fit, [*notes, *said, *take_last(module, fit, checkpoint), *_note_missing(fit)]
        tried.append(fit)
    best = max(tried, key=lambda fit: len(fit.found))
    best.check(where, strict=True, hint=_fitting_option(module, checkpoint, names, best))
    return best, notes


def _selected(held: list[str], where: str, key: str, ignore: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the names to use, without those that are ignored or outside `key`, and a note of those left out."""
    notes, names = list[str](), held
    if key:
        names = [
            name for name in held if name.startswith(f"{key}.") or _unwrapped(name).startswith(f"{key}.")
        ]
        if not names:
            first = ", ".join(dict.fromkeys(name.partition(".")[0] for name in held))
            raise UsageError(
                f"the checkpoint has no {key!r}", where="--key", hint=f"Its names begin with {first[:200]}"
            )
        notes.append(f"took the {len(names)} tensors under {key!r}, left {len(held) - len(names)}")
    for glob in ignore:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"no tensor of the checkpoint matches {glob!r}",
                where="--ignore-keys",
                hint=f"Its names: {', '.join(held[:4])}",
            )
    left = [name for name in names if any(fnmatchcase(name, glob) for glob in ignore)]
    left += [name for name in names if name in COUNTERS and len(names) > 1]
    if left:
        notes.append(f"ignored {', '.join(left[:8])}" + (f" and {len(left) - 8} more" if left[8:] else ""))
    return [name for name in names if name not in set(left)], notes


def _renamings(names: list[str], wanted: list[str]) -> Iterator[tuple[Names, list[str]]]:
    """Yield renamings from the least to the most: none, without wrappers, without or with a common prefix."""
    yield {name: name for name in names}, []
    bare = {_unwrapped(name): name for name in names}
    if len(bare) < len(names):
        return
    said: list[str] = []
    taken = [part for part in WRAPPERS if any(part in name.split(".") for name in names)]
    if taken:
        said = [f"took {' and '.join(f'{part}.' for part in taken)} out of the names"]
    yield _restore_wrappers(bare, wanted), said
    prefix = ""
    for part in _common(list(bare)):
        prefix += f"{part}."
        cut = {name.removeprefix(prefix): source for name, source in bare.items()}
        yield _restore_wrappers(cut, wanted), [*said, f"took the prefix {prefix!r} off {len(cut)} names"]
    prefix = ""
    for part in _common([_unwrapped(name) for name in wanted]):
        prefix += f"{part}."
        grown = {prefix + name: source for name, source in bare.items()}
        yield (
            _restore_wrappers(grown, wanted),
            [*said, f"put the prefix {prefix!r} before {len(grown)} names"],
        )


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _restore_wrappers(bare: Names, wanted: list[str]) -> Names:
    """Return `bare` with the wrappers of the model's own names put back."""
    own = {_unwrapped(name): name for name in wanted}
    return {own.get(name, name): source for name, source in bare.items()}


def _common(names: list[str]) -> list[str]:
    """Return the parts with which every name begins, without the last part of any."""
    parts = [name.split(".")[:-1] for name in names]
    found: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) != 1:
            break
        found.append(column[0])
    return found


def _exact(fit: CheckpointMatch) -> bool:
    return len(fit.missing) == len(missing_batch_counters(fit)) and not fit.unexpected and not fit.shapes


def missing_batch_counters(fit: CheckpointMatch) -> list[str]:
    """List the `num_batches_tracked` buffers that the checkpoint lacks; 0 does, since only training reads them."""
    return [name for name in fit.missing if name.endswith(TRAINING_ONLY)]


def _note_missing(fit: CheckpointMatch) -> list[str]:
    counters = missing_batch_counters(fit)
    return (
        [f"{len(counters)} num_batches_tracked are not in it: 0 (training alone reads them)"]
        if counters
        else []
    )


def _fitting_option(module: nn.Module, checkpoint: Checkpoint, names: list[str], fit: CheckpointMatch) -> str:
    """Return the option that would make the checkpoint fit; empty where none would."""
    keys = [key for key in _prefixes(names) if _fits_under(key, module, checkpoint, names)]
    if keys:
        return f"What is under {' or '.join(map(repr, keys[:4]))} fits the model: --key {keys[0]}"
    if fit.unexpected and not fit.shapes and len(fit.missing) == len(missing_batch_counters(fit)):
        return f"If the model can do without: {' '.join(f'--ignore-keys {glob!r}' for glob in _globs(fit))}"
    return ""


def _fits_under(key: str, module: nn.Module, checkpoint: Checkpoint, names: list[str]) -> bool:
    under = [name for name in names if name.startswith(f"{key}.")]
    wanted = list(module.state_dict(keep_vars=True))
    return any(
        _exact(match_checkpoint(module, checkpoint, names=renamed))
        for renamed, _ in _renamings(under, wanted)
    )


def _prefixes(names: list[str]) -> list[str]:
    """List the first one and two parts of names that not all of them share."""
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")[:-1]
        for depth in (1, 2):
            if len(parts) >= depth:
                counts[".".join(parts[:depth])] = counts.get(".".join(parts[:depth]), 0) + 1
    return [key for key, count in counts.items() if count < len(names)][:32]


def _globs(fit: CheckpointMatch) -> list[str]:
    used = {source.partition(".")[0] for source in fit.found.values()}
    firsts = dict.fromkeys(name.partition(".")[0] for name in fit.unexpected)
    short = [first if first in fit.unexpected else f"{first}.*" for first in firsts if first not in used]
    return [*short, *(name for name in fit.unexpected if name.partition(".")[0] in used)][:6]
