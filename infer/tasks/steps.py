"""Steps of a task: what it asks of whoever runs it, such as tokens of texts and outputs of rows.

A task is a generator: it yields steps, is sent the result of each, and returns the answer. So it is written once:
`Predictor` performs its steps at once (`perform`), and the server awaits them, whose tokenizer lies in another process
and whose rows run in a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..llm.engine.requests import Request
from ..llm.text.tokenizer import TextOrPair, padded
from ..spec import TensorSpec

T = TypeVar("T")
Outputs = Mapping[str, Sequence[np.ndarray] | np.ndarray]  # by name, one of each row without its padding


class RunTexts(NamedTuple):
    """Run texts or pairs, tokenized: gives `outputs`, by name. `where`: field of a request, for errors."""

    texts: Sequence[TextOrPair]
    outputs: tuple[str, ...]
    where: str


class Encode(NamedTuple):
    """Tokenize texts, special tokens included: gives the ids of each."""

    texts: Sequence[TextOrPair]
    where: str


class EncodeSpans(NamedTuple):
    """Tokenize texts, or the one text in windows behind a question: gives encodings, see `text_answers`."""

    texts: Sequence[str]
    question: str | None
    where: str


class RunRows(NamedTuple):
    """Run rows of token ids: gives `outputs`, by name. `types`, `attended`: of each token, by default 0 and 1."""

    rows: Sequence[Sequence[int]]
    outputs: tuple[str, ...]
    types: Sequence[Sequence[int]] = ()
    attended: Sequence[Sequence[int]] = ()

    def arrays(self, pad_id: int) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and `token_type_ids`, int64 [rows, longest], right-padded."""
        return padded(self.rows, self.types, self.attended, pad_id=pad_id)

    def chosen(self, numbers: Sequence[int]) -> RunRows:
        """Return some of the rows."""
        rows, types, attended = (
            [part[i] for i in numbers] if part else () for part in (self.rows, self.types, self.attended)
        )
        return RunRows(rows, self.outputs, types, attended)


class RunTensors(NamedTuple):
    """Run preprocessed images or sounds, of one row each: gives the outputs of each, by name."""

    tensors: Sequence[dict[str, np.ndarray]]


class Generate(NamedTuple):
    """Generate by a language model: gives the `Completion` of each request, to which the id is given then."""

    requests: Sequence[Request]


class FindTokens(NamedTuple):
    """Look tokens up as the vocabulary spells them: gives the id of each, None for one that it lacks."""

    tokens: Sequence[str]


class Decode(NamedTuple):
    """Decode rows of token ids, True beside one that is shown without special tokens: gives the text of each."""

    rows: Sequence[tuple[list[int], bool]]


class Compute(NamedTuple):
    """Call a function that takes its time: gives its result."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


Step = RunTexts | Encode | EncodeSpans | RunRows | RunTensors | Generate | FindTokens | Decode | Compute
Steps = Generator[Step, Any, T]


def perform(steps: Steps[T], result_of: Callable[[Any], Any]) -> T:
    """Perform the steps of a task one after another, and return its answer."""
    try:
        step = next(steps)
        while True:
            step = steps.send(result_of(step))
    except StopIteration as done:
        answer: T = done.value
        return answer


def without_padding(
    step: RunRows,
    outputs: Mapping[str, np.ndarray],
    specs: Sequence[TensorSpec],
    lengths: Sequence[int],
) -> Outputs:
    """Return the outputs of padded rows that a step reads, those of each token cut to the length of the row."""
    ragged = {spec.name for spec in specs if len(spec.shape) > 1 and isinstance(spec.shape[1], str)}
    found: dict[str, Sequence[np.ndarray] | np.ndarray] = {}
    for name in step.outputs:
        rows: Any = outputs[name]
        found[name] = [row[:n] for row, n in zip(rows, lengths, strict=True)] if name in ragged else rows
    return found
