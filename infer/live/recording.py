"""Recording of the calls of modules inside a running program, and verified modules in their place."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import GateError, NotUsableError, UsageError
from ..reporter import Reporter
from .call_structure import tensors_of
from .compile import compile as compile_model
from .compiled_model import CompiledModel
from .given_calls import Call

CALLS = 64  # that are kept of a module
BYTES = 256 << 20  # of their tensors


class Recording:
    """Calls of modules, a sample of bounded size: every call had the same chance to be kept.

    Of each shape that was seen at least one call is kept, so that sizes are known over the whole of their range.
    """

    def __init__(self, modules: tuple[nn.Module, ...], most_calls: int, most_bytes: int, seed: int) -> None:
        self.modules = modules
        self._samples = {
            id(module): _Sample(most_calls, most_bytes, random.Random(seed)) for module in modules
        }

    def of(self, module: nn.Module) -> list[Call]:
        """Return the calls that were kept of a module; `UsageError` for one that was not recorded."""
        if id(module) not in self._samples:
            raise UsageError(f"{type(module).__name__} was not recorded", hint="Name it in infer.record(...)")
        return self._samples[id(module)].calls

    def count(self, module: nn.Module) -> int:
        """Return how often a recorded module was called."""
        return self._samples[id(module)].seen

    def add(self, module: nn.Module, call: Call) -> None:
        """Keep a call, or not."""
        self._samples[id(module)].add(call)

    def __repr__(self) -> str:
        lines = (
            f"{type(module).__name__}: {self.count(module)} calls, {len(self.of(module))} kept"
            for module in self.modules
        )
        return "\n".join(lines)


@dataclass
class _Sample:
    """Reservoir of the calls of one module (Vitter, 1985, algorithm R), with one place for each shape."""

    most_calls: int
    most_bytes: int
    random: random.Random
    seen: int = 0
    by_shape: dict[tuple[Any, ...], Call] = field(default_factory=dict)
    drawn: list[Call] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        """Calls that are kept."""
        return [*self.by_shape.values(), *self.drawn]

    def add(self, call: Call) -> None:
        self.seen += 1
        shape = tuple(tuple(tensor.shape) for tensor in tensors_of((call.args, dict(call.kwargs))))
        half, size = max(1, self.most_calls // 2), call.num_bytes
        room = self.most_bytes - sum(kept.num_bytes for kept in self.calls)
        if self.seen == 1 or (shape not in self.by_shape and len(self.by_shape) < half and size <= room):
            self.by_shape[shape] = _copied(call)
        elif len(self.drawn) < half and size <= room:
            self.drawn.append(_copied(call))
        elif (place := self.random.randrange(self.seen)) < len(self.drawn) and (
            size - self.drawn[place].num_bytes <= room
        ):
            self.drawn[place] = _copied(call)


def _copied(call: Call) -> Call:
    """Copy a call: the program may write into its tensors and dicts."""
    with torch.inference_mode(False), torch.no_grad():
        return call.copied(tensors=True)


@contextmanager
def record(
    *modules: nn.Module, most_calls: int = CALLS, most_bytes: int = BYTES, seed: int = 0
) -> Iterator[Recording]:
    """Keep the calls of modules while a program runs that contains them.

        with infer.record(pipe.unet, pipe.text_encoder) as calls:
            pipe("a cat")
        infer.replace(pipe, calls, quant="int8")

    At most `most_calls` calls and `most_bytes` bytes are kept of each, drawn at random, with every shape among them.
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise UsageError(f"expected modules, got {type(module).__name__}", where="infer.record")
    recording = Recording(modules, most_calls, most_bytes, seed)

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.add(module, Call(args, kwargs))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield recording


@dataclass(frozen=True)
class Replacement:
    """One recorded module of a program: what is in its place, or why it is still itself."""

    place: str  # attribute path in the program
    compiled: CompiledModel | None
    reason: str = ""

    def __str__(self) -> str:
        if self.compiled is None:
            return f"{self.place}: kept as it was: {self.reason}"
        headlines = (report.headline for _, report in self.compiled.report.reports)
        return f"{self.place}: {'; '.join(headlines)}"


def replace(
    program: Any, calls: Recording, *, reporter: Reporter | None = None, **options: Any
) -> list[Replacement]:
    """Put a verified form of every recorded module in its place in `program`; `restore` takes them out again.

    `program` is an object whose attributes, or their attributes, are the modules: a pipeline, a module, a class of your
    own. `options` are those of `infer.compile`. A module that fails a gate or can't be captured stays itself, and its
    `Replacement` has the reason. Raises `UsageError` where a recorded module is not part of the program.
    """
    places = {id(value): (owner, name, path) for owner, name, path, value in _places(program)}
    done: list[Replacement] = []
    for module in calls.modules:
        if id(module) not in places:
            raise UsageError(
                f"{type(module).__name__} is no part of {type(program).__name__}", where="infer.replace"
            )
        owner, name, path = places[id(module)]
        try:
            compiled = compile_model(module, calls.of(module), reporter=reporter, **options)
        except (GateError, NotUsableError, UsageError) as error:
            done.append(Replacement(path, None, str(error)))
            continue
        _put(owner, name, compiled)
        done.append(Replacement(path, compiled))
    return done


def restore(program: Any) -> int:
    """Put the original of every compiled module of `program` back; return how many there were."""
    places = list(_places(program))
    compiled = [(owner, name, value) for owner, name, _, value in places if isinstance(value, CompiledModel)]
    for owner, name, replaced in compiled:
        _put(owner, name, replaced.original)
        replaced.close()
    return len(compiled)


def _places(program: Any) -> Iterator[tuple[Any, Any, str, nn.Module]]:
    """Yield owner, name, path and value of every module that is reached from a program, outer ones first."""
    waiting: list[tuple[Any, str]] = [(program, "")]
    seen: set[int] = set()
    while waiting:
        owner, path = waiting.pop(0)
        if id(owner) in seen or isinstance(owner, CompiledModel):
            continue
        seen.add(id(owner))
        for name, value in _parts(owner):
            inner = f"{path}.{name}" if path else str(name)
            if isinstance(value, nn.Module):
                yield owner, name, inner, value
                waiting.append((value, inner))
            elif isinstance(value, dict | list) and path.count(".") < 2:
                waiting.append((value, inner))


def _parts(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, Mapping):
        return list(owner.items())
    if isinstance(owner, list):
        return list(enumerate(owner))
    own = list(vars(owner).items()) if hasattr(owner, "__dict__") else []
    if isinstance(owner, nn.Module):
        return [*owner._modules.items(), *((name, value) for name, value in own if not name.startswith("_"))]
    return own


def _put(owner: Any, name: Any, value: nn.Module) -> None:
    if isinstance(owner, dict | list):
        owner[name] = value
    elif isinstance(owner, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        owner._modules[str(name)] = value
    else:
        setattr(owner, name, value)
