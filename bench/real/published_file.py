"""One published model file: where it lies, real inputs for it, and how well a side does its task on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.real.published_wheels import unzipped

Arrays = dict[str, np.ndarray]
Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Example:
    """One real input. `steps` are further calls that carry a state: of each output in `carry` to that input."""

    inputs: Arrays
    truth: Any = None
    steps: Sequence[Arrays] = ()
    carry: Mapping[int, str] = field(default_factory=dict)


# Example, outputs of a side, outputs of the original → how well the side did, larger being better.
Score = Callable[[Example, list[np.ndarray], list[np.ndarray]], float]


@dataclass(frozen=True)
class PublishedFile:
    """A model file in a wheel."""

    name: str
    wheel: str
    path: str
    kind: str
    measure: str  # what `score` is
    examples: Callable[[Path], list[Example]] | None = None
    score: Score | None = None
    axes: Mapping[str, int] | None = None  # of an input's rows, 0 if not named; None: one row a call
    code: tuple[
        str, ...
    ] = ()  # words of the command line that bring its code; without them no command can open it
    trusts: bool = False  # the file holds code
    needs: str = ""  # a package that its code needs and that isn't installed
    timeout: float | None = None  # seconds, where it is more than that of the table

    @property
    def file(self) -> Path:
        return unzipped(self.wheel) / self.path

    def rows(self, examples: Sequence[Example], count: int) -> Arrays | None:
        """Return the inputs of `count` rows, made of the examples in turn; None where the file takes one at a time."""
        if count == 1:
            return dict(examples[0].inputs)
        if self.axes is None:
            return None
        first = examples[0].inputs
        same = [one for one in examples if all(one.inputs[n].shape == first[n].shape for n in first)]
        taken = [same[index % len(same)].inputs for index in range(count)]
        return {
            n: np.concatenate([one[n] for one in taken], self.axes.get(n, 0)) if first[n].ndim else first[n]
            for n in first
        }


def answer(run: Run, example: Example) -> list[np.ndarray]:
    """Return what a side gives for an example: of one with steps, the outputs of all steps but the state."""
    outputs = run(example.inputs)
    if not example.steps:
        return outputs
    kept = [[value for index, value in enumerate(outputs) if index not in example.carry]]
    for step in example.steps:
        state = {name: outputs[index] for index, name in example.carry.items()}
        outputs = run({**example.inputs, **state, **step})
        kept.append([value for index, value in enumerate(outputs) if index not in example.carry])
    return [np.concatenate([np.atleast_1d(value) for value in values]) for values in zip(*kept, strict=True)]


def edit_distance(a: str, b: str) -> int:
    """Return the number of characters to insert, delete or change (Levenshtein)."""
    before = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        now = [i]
        for j, y in enumerate(b, 1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (x != y)))
        before = now
    return before[-1]


def characters_read(text: str, truth: str) -> float:
    """Return the share of the characters of the truth that were read."""
    return max(0.0, 1 - edit_distance(text, truth) / max(len(truth), 1))


def same_class(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the share of rows whose largest value is that of the original's, of the first output."""
    return float(np.mean(outputs[0].argmax(-1) == original[0].argmax(-1)))


def right_class(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return 1 where the largest value of the first output is that of the true class."""
    return float(outputs[0].reshape(-1).argmax() == example.truth)


def same_above(threshold: float, output: int = 0) -> Score:
    """Return the overlap (intersection over union) of what lies above a threshold with the original's."""

    def score(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
        ours, theirs = outputs[output] > threshold, original[output] > threshold
        either = np.count_nonzero(ours | theirs)
        return float(np.count_nonzero(ours & theirs) / either) if either else 1.0

    return score


def points_away(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return minus the mean difference from the original's scores, in points."""
    return -float(np.mean([np.abs(a - b).mean() for a, b in zip(outputs, original, strict=True)]))


def cosine_to_original(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the cosine of the first output with the original's."""
    a, b = outputs[0].ravel().astype(np.float64), original[0].ravel().astype(np.float64)
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))
