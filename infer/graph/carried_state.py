"""State that a caller carries: outputs of a call that are inputs of the next, known by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..spec import TensorSpec

# Words of a name that tell one side of a step from the other, or count.
_SIDES = {
    "in",
    "out",
    "input",
    "output",
    "new",
    "next",
    "prev",
    "previous",
    "past",
    "present",
    "last",
    "init",
}
_SIDES |= {"initial", "final", "old", "updated", "n", "t", "i", "o", "0", "1"}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def states(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the output that each carried input comes from, such as {"state": "stateN"}, {"h_0": "h_n"}.

    Their names say the same but for the side, their dtypes and shapes are equal, and no other pair has that name.
    Another input holds the data: what has no other is no state.
    """
    found: dict[str, str] = {}
    for given in inputs:
        same = [out for out in outputs if out.dtype == given.dtype and out.shape == given.shape]
        essence = _essence(given.name)
        named = [out.name for out in same if essence and _essence(out.name) == essence]
        if len(named) == 1 and named[0] not in found.values():
            found[given.name] = named[0]
    return found if len(found) < len(inputs) else {}


def _essence(name: str) -> tuple[str, ...]:
    """Return the words of a name that both sides share: (`h`,) of `h_0`, `hn` and `h_out`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    words = [word[0] if word in ("hn", "cn") else word for word in words]
    return tuple(word for word in words if word not in _SIDES)


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


def shifted(inputs: Mapping[str, Tensor], samples: Mapping[str, Tensor], call: int) -> dict[str, Tensor]:
    """Return the inputs of call number `call`: other rows of the samples for each, as many as in `inputs`."""
    found = {}
    for name, value in inputs.items():
        rows = samples[name]
        moves = bool(value.dim()) and value.shape[1:] == rows.shape[1:] and len(rows) > len(value)
        at = torch.arange(call, call + len(value)) % len(rows) if moves else None
        found[name] = value if at is None else rows[at]
    return found
