"""State that a caller carries: outputs of a call that are inputs of the next, known by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from . import rows
from .spec import TensorSpec

# Words of a name that tell one side of a step from the other, or count.
_SIDES = {
    "in", "out", "input", "output", "new", "next", "prev", "previous", "past", "present", "last", "init", "initial",
    "final", "old", "updated", "n", "t", "i", "o", "0", "1",
}  # fmt: skip
_STATES = {
    "h", "c", "hx", "cx", "hc", "state", "states", "hidden", "cell", "cache", "memory", "mem", "carry", "rnn", "lstm",
    "gru", "buffer", "buf", "mems",
}  # fmt: skip
# Words of a name that say which call it is of.
_TIMES = frozenset("past prev previous present next last old new updated init initial final".split())  # noqa: SIM905
_NUMBERED = re.compile(r"output(_\d+)?")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def states(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the output that each carried input comes from, such as {"state": "stateN"}, {"h_0": "h_n"}.

    Their names say the same but for the side, and that they are a state or of which call they are: an image that comes
    back as an image is none. Their dtypes and shapes are equal, and no other pair has that name; of outputs that are
    only numbered, the last ones are the states of inputs that are called so, in order. Another input holds the data:
    what has no other is no state.
    """
    pairs: dict[str, str] = {}
    for spec in inputs:
        same = [out for out in outputs if out.dtype == spec.dtype and out.shape == spec.shape]
        essence = _essence(spec.name)
        named = [
            out.name
            for out in same
            if essence
            and _essence(out.name) == essence
            and (is_called_state(spec.name) or _times(spec.name, out.name))
        ]
        if len(named) == 1 and named[0] not in pairs.values():
            pairs[spec.name] = named[0]
    for spec in reversed([s for s in inputs if s.name not in pairs and is_called_state(s.name)]):
        same = [out for out in outputs if out.dtype == spec.dtype and out.shape == spec.shape]
        numbered = [o.name for o in same if _NUMBERED.fullmatch(o.name) and o.name not in pairs.values()]
        if numbered:
            pairs[spec.name] = numbered[-1]
    pairs = {spec.name: pairs[spec.name] for spec in inputs if spec.name in pairs}
    return pairs if len(pairs) < len(inputs) else {}


def sentence(pairs: Mapping[str, str]) -> list[str]:
    """Return the sentence of a verdict on states, none for a model without any."""
    if not pairs:
        return []
    each = ", ".join(f"{name} from {source}" for name, source in pairs.items())
    return [f"carries state from call to call ({each}), which begins as zeros; timed at batch 1"]


def states_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec] | None) -> set[str]:
    """Return the inputs that are states; by their names alone where the outputs are not known yet."""
    if outputs is not None:
        return set(states(inputs, outputs))
    called = {spec.name for spec in inputs if is_called_state(spec.name)}
    return called if len(called) < len(inputs) else set()


def is_called_state(name: str) -> bool:
    """Return true for the name of a recurrent state or of a cache: `h`, `c0`, `lstm_state`, `conv_cache`."""
    return any(word in _STATES for word in _essence(name))


def zeros(
    inputs: Sequence[TensorSpec], names: Collection[str], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return states of zeros, as every sequence begins; a size that is not known is 1."""
    return {
        spec.name: torch.zeros(
            [sizes.get(size, 1) if isinstance(size, str) else size for size in spec.shape],
            dtype=spec.torch_dtype,
        )
        for spec in inputs
        if spec.name in names
    }


def of_state_shapes(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], seen: Mapping[str, Tensor]
) -> tuple[TensorSpec, ...]:
    """Give outputs that are named like an input its shape, where they were seen to have it: files leave it out."""
    shaped = []
    for out in outputs:
        like = [x for x in inputs if x.dtype == out.dtype and _essence(x.name) == _essence(out.name)]
        fits = len(like) == 1 and len(like[0].shape) == len(out.shape)
        fits = fits and all(
            want == have or (isinstance(want, int) and isinstance(have, str) and want == size)
            for want, have, size in zip(like[0].shape, out.shape, seen[out.name].shape, strict=True)
        )
        shaped.append(TensorSpec(out.name, out.dtype, like[0].shape) if fits else out)
    return tuple(shaped)


def _essence(name: str) -> tuple[str, ...]:
    """Return the words of a name that both sides share: (`h`,) of `h_0`, `hn` and `h_out`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    words = [word[0] if word in ("hn", "cn") else word for word in words]
    return tuple(word for word in words if word not in _SIDES)


def _times(*names: str) -> bool:
    return any(word.lower() in _TIMES for name in names for word in _WORDS.findall(name))


class Carrying:
    """A runner called again and again, of which each call is given the state that the one before returned."""

    def __init__(self, run: Run, pairs: Mapping[str, str]) -> None:
        self._run, self._pairs = run, pairs
        self._state: dict[str, Tensor] = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one call; states among `inputs` count for the first one alone."""
        named = {**inputs, **self._state}
        outputs = dict(self._run(named))
        for name, source in self._pairs.items():
            state = outputs.get(source)
            if state is not None and (state.shape, state.dtype) == (named[name].shape, named[name].dtype):
                self._state[name] = state.clone()  # another one is no state: that is reported as an output
        return outputs


def shifted(
    specs: Sequence[TensorSpec], inputs: Mapping[str, Tensor], samples: Mapping[str, Tensor], call: int
) -> dict[str, Tensor]:
    """Return the inputs of call number `call`: other rows of the samples for each, as many as in `inputs`."""
    have, wanted = rows.count(specs, samples), rows.count(specs, inputs)
    if have <= wanted:
        return dict(inputs)
    return rows.take(specs, samples, torch.arange(call, call + wanted) % have)
