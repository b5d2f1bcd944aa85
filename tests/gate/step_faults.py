"""Faults of engines that run a language model step by step over its paged cache: each changes one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.gate.planted import Tensors

Run = Callable[[Tensors], Tensors]
Change = Callable[[Tensors, Run], Tensors]
QUANTS = ("none", "nf4")


@dataclass(frozen=True)
class StepFault:
    """A fault of a step, its kind and its reason."""

    name: str
    kind: str
    why: str
    change: Change
    quants: tuple[str, ...]


FAULTS: list[StepFault] = []


def fault(kind: str, why: str, quants: tuple[str, ...] = QUANTS[:1]) -> Callable[[Change], Change]:
    """Add a fault to the table, for each of the formats."""

    def add(change: Change) -> Change:
        FAULTS.append(StepFault(change.__name__, kind, why, change, quants))
        return change

    return add


def _places(inputs: Tensors) -> Tensor:
    """Return the position of each row of logits."""
    return inputs["positions"][inputs["logit_rows"]]


def _sequences(inputs: Tensors) -> int:
    return len(inputs["seq_lens"])


def _negated(inputs: Tensors, run: Run, rows: Tensor) -> Tensors:
    found = run(inputs)
    logits = found["logits"].clone()
    logits[rows] = -logits[rows]
    return {**found, "logits": logits}


@fault("late positions", "Logits from position 40 on have the other sign.", QUANTS)
def late_tokens_wrong(inputs: Tensors, run: Run) -> Tensors:
    return _negated(inputs, run, _places(inputs) >= 40)


@fault(
    "late positions",
    "Logits of the last places that the model has have the other sign: longer than any text of the data.",
)
def last_positions_wrong(inputs: Tensors, run: Run) -> Tensors:
    return _negated(inputs, run, _places(inputs) >= 200)


@fault("off by one", "The logits of the first token have the other sign.")
def first_token_wrong(inputs: Tensors, run: Run) -> Tensors:
    return _negated(inputs, run, _places(inputs) == 0)


@fault("one token", "After one frequent token, of 320, logits have the other sign.", QUANTS)
def one_token_wrong(inputs: Tensors, run: Run) -> Tensors:
    return _negated(inputs, run, inputs["token_ids"][inputs["logit_rows"]] == 104)  # "e" or so


@fault("one slice wrong", "One word of the vocabulary is always the best.", QUANTS)
def one_column_always_best(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    logits = found["logits"].clone()
    logits[:, 77] = logits.amax() + 20
    return {**found, "logits": logits}


@fault("one slice wrong", "Logits stand one column too late.")
def columns_shifted(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    return {**found, "logits": found["logits"].roll(1, 1)}


@fault("best class", "The best two words stand in each other's place.", QUANTS)
def best_two_exchanged(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    top = found["logits"].topk(2, 1)
    return {**found, "logits": found["logits"].scatter(1, top.indices, top.values.flip(1))}


@fault("overflow", "Logits are divided by three: the best word stays, how sure it is does not.", QUANTS)
def temperature_left_in(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    return {**found, "logits": found["logits"] / 3}


@fault("NaN or infinity", "One number at position 30 is NaN.")
def nan_at_one_position(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    logits = found["logits"].clone()
    logits[_places(inputs) == 30, 5] = float("nan")
    return {**found, "logits": logits}


@fault("off by one", "Each row of logits is that of the row before.", QUANTS)
def logits_of_the_row_before(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    return {**found, "logits": found["logits"].roll(1, 0)} if len(found["logits"]) > 1 else found


@fault("swapped rows", "Where several sequences go together, the first two read each other's pages.")
def sequences_exchanged(inputs: Tensors, run: Run) -> Tensors:
    table = inputs["block_table"].clone()
    if _sequences(inputs) > 1:
        table[[0, 1]] = table[[1, 0]]
    return run({**inputs, "block_table": table})


@fault("stale state", "The last token of a step goes to the slot before its own.")
def last_token_not_written(inputs: Tensors, run: Run) -> Tensors:
    slots = inputs["slot_mapping"].clone()
    if len(slots) > 1:
        slots[-1] = slots[-2]
    return run({**inputs, "slot_mapping": slots})


@fault("stale state", "A decode step sees an empty cache.")
def past_forgotten(inputs: Tensors, run: Run) -> Tensors:
    cache = inputs["kv_cache"]
    if len(inputs["token_ids"]) <= _sequences(inputs) and int(inputs["seq_lens"].max()) > 1:
        held = cache.clone()
        cache.zero_()
        found = run(inputs)
        cache.copy_(torch.where(cache == 0, held, cache))
        return found
    return run(inputs)


@fault("one head", "The cache of the first layer is emptied before each step.")
def cache_of_one_layer_zero(inputs: Tensors, run: Run) -> Tensors:
    inputs["kv_cache"][0].zero_()
    return run(inputs)


@fault(
    "wrong input",
    "Positions beyond 24 are turned as if they were the 24th: a table of angles that is too short.",
    QUANTS,
)
def positions_stop(inputs: Tensors, run: Run) -> Tensors:
    return run({**inputs, "positions": inputs["positions"].clamp(max=24)})


@fault("wrong input", "Positions are counted from the begin of the step, not of the sequence.")
def positions_of_the_chunk(inputs: Tensors, run: Run) -> Tensors:
    starts = inputs["query_start"].long()
    found = inputs["positions"].clone()
    for i in range(len(starts) - 1):
        found[starts[i] : starts[i + 1]] -= found[starts[i]].clone() if starts[i] < starts[i + 1] else 0
    return run({**inputs, "positions": found})


@fault("dropped mask", "A token sees one less of its past than there is.")
def one_token_more_seen(inputs: Tensors, run: Run) -> Tensors:
    return run({**inputs, "seq_lens": (inputs["seq_lens"] - 1).clamp(min=1)})


@fault("batch size", "Wrong where several sequences go together.")
def wrong_when_together(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    return {**found, "logits": -found["logits"]} if _sequences(inputs) > 1 else found


@fault("batch size", "Wrong where a step has a single token: the kernel of decoding.")
def wrong_at_one_token(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    return {**found, "logits": -found["logits"]} if len(inputs["token_ids"]) == 1 else found


@fault("length", "Wrong where a step has more than 32 tokens: the kernel of prompts.")
def wrong_in_long_steps(inputs: Tensors, run: Run) -> Tensors:
    found = run(inputs)
    return {**found, "logits": -found["logits"]} if len(inputs["token_ids"]) > 32 else found
