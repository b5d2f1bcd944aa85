"""Models built on the meta device, and the match of their state dict with a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import InferError, SourceError
from ...library_errors import describe
from ...spec import Finding
from ...weights import Checkpoint
from ..sources.user_module import user_code_errors
from .fill_weights import assign, saved_tensors

_EMPTY = (torch.empty, torch.empty_strided)
_RANDOM = frozenset(
    """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial normal_ uniform_ random_
    bernoulli_ exponential_ cauchy_ log_normal_ geometric_ trunc_normal_
    """.split()  # noqa: SIM905 - a word is a function
)
LISTED = 10


class EmptyOnMeta(TorchFunctionMode):
    """Torch function mode in which `torch.empty` returns meta tensors; everything else stays real.

    Layers allocate their weights with `torch.empty`, while tables that are not in the checkpoint (rotary
    frequencies, position ids, masks) are computed by `arange` and the like: these are right at once. `drew`: random
    numbers became real values, which differ from those of a build on the CPU, where weights draw theirs first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _EMPTY and named.get("device") is None:
            named["device"] = "meta"
        result = func(*args, **named)
        if getattr(func, "__name__", "") in _RANDOM and isinstance(result, Tensor) and not result.is_meta:
            self.drew = True
        return result


def build_on_meta(factory: Callable[[], nn.Module], what: str) -> tuple[nn.Module, list[Finding]]:
    """Build the factory's module in eval mode with its state dict on the meta device.

    A finding gives the reason where the module had to be built on the CPU.
    """
    findings: list[Finding] = []
    try:
        with EmptyOnMeta() as mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            module = _called(factory, what)
        reason = _left_on_meta(module)
        if mode.drew and _unsaved(module):
            reason = (
                f"random numbers may be in {', '.join(list(_unsaved(module))[:3])}, which no checkpoint holds"
            )
    except InferError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code; what fails on the CPU too is reported below
        reason = describe(error)
    if reason:
        findings.append(Finding("load", "skeleton", "cpu", why=f"{what} can't be built on meta ({reason})"))
        with user_code_errors(what):
            module = _called(factory, what)
            if reason.startswith("random"):
                _check_repeatable(module, _called(factory, what), what)
    _drop_values(module)
    return module.eval(), findings


def _unsaved(module: nn.Module) -> dict[str, Tensor]:
    """Return buffers that are in no state dict, by name."""
    saved = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


def _check_repeatable(module: nn.Module, again: nn.Module, what: str) -> None:
    """Raise `SourceError` when two calls of a factory differ in buffers that no checkpoint holds."""
    others = _unsaved(again)
    for name, buffer in _unsaved(module).items():
        if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(others[name])):
            raise SourceError(
                f"{what} fills buffer {name!r} with other random numbers at each call, and the checkpoint lacks it",
                hint="Register it as a persistent buffer, or seed torch in the factory",
            )


def _called(factory: Callable[[], nn.Module], what: str) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise SourceError(f"expected {what} to return an nn.Module, got {type(module).__name__}")
    return module


def _left_on_meta(module: nn.Module) -> str:
    """Return the reason why a meta tensor would never get a value (it is in no state dict), else ""."""
    saved = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_meta and name not in saved:
            return f"buffer {name!r} is not in the state dict and was made by torch.empty"
    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_meta:
                return f"{name or 'the model'} holds a bare tensor {attribute!r} made by torch.empty"
    return ""


def _drop_values(module: nn.Module) -> None:
    """Move everything in the state dict to the meta device; tied parameters stay tied."""
    on_meta: dict[int, Tensor] = {}
    for owner, name, _, tensor in saved_tensors(module):
        if not tensor.is_meta:
            if id(tensor) not in on_meta:
                empty, is_parameter = tensor.detach().to("meta"), isinstance(tensor, nn.Parameter)
                on_meta[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            assign(owner, name, on_meta[id(tensor)])


def match_checkpoint(
    module: nn.Module,
    checkpoint: Checkpoint,
    propose: Callable[[str], list[str]] = lambda name: [],
    names: Mapping[str, str] | None = None,
) -> CheckpointMatch:
    """Match each state dict entry with a checkpoint tensor.

    `propose` gives other names to try. `names` (name to match → name in the checkpoint) limits the tensors to use.
    """
    held = {name: name for name in checkpoint} if names is None else names
    wanted = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    sources: dict[str, str] = {}
    for name in wanted:
        known = next((n for n in (name, *propose(name)) if n in held), None)
        if known is not None:
            sources[name] = held[known]
    stored = set(sources)
    by_tensor = {id(wanted[name]): source for name, source in sources.items()}
    for name, tensor in wanted.items():
        if name not in sources and id(tensor) in by_tensor:
            sources[name] = by_tensor[id(tensor)]
    shapes = [
        f"{name} {list(wanted[name].shape)} in the model, {list(checkpoint[source].shape)} in the checkpoint"
        for name, source in sources.items()
        if tuple(wanted[name].shape) != checkpoint[source].shape
    ]
    used = set(sources.values())
    missing = [n for n in wanted if n not in sources]
    return CheckpointMatch(sources, missing, [n for n in held.values() if n not in used], shapes, stored)


@dataclass
class CheckpointMatch:
    """Mapping of model names to checkpoint names (`found`), and lists of what does not fit.

    `own`: names that the checkpoint has itself; others are found by a tensor that is tied to theirs.
    """

    found: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    shapes: list[str]
    own: set[str]

    @property
    def renames(self) -> dict[str, str]:
        return {name: source for name, source in self.found.items() if name != source}

    def check(self, where: str, *, strict: bool, hint: str = "") -> None:
        """Raise `SourceError` listing what differs; unexpected tensors count only when `strict`."""
        lines = [_line("missing in the checkpoint", self.missing)]
        lines.append(_line("unexpected in the checkpoint", self.unexpected) if strict else "")
        lines.append(_line("of another shape", self.shapes))
        differences = [line for line in lines if line]
        if differences:
            raise SourceError(
                f"the checkpoint does not fit the model: {'; '.join(differences)}",
                where=where,
                hint=hint or self._hint(),
            )

    def _hint(self) -> str:
        """Return a hint naming the prefix that would make a missing name an unexpected one."""
        for wanted in self.missing[:LISTED]:
            for have in self.unexpected:
                if have.endswith(f".{wanted}"):
                    return f"The checkpoint's names have the prefix {have[: -len(wanted)]!r}"
                if wanted.endswith(f".{have}"):
                    return f"The model's names have the prefix {wanted[: -len(have)]!r}"
        return "Is it the checkpoint of another model, or of another version of its code?"


def _line(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:LISTED])}{more}"
