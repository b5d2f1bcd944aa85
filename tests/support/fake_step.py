"""A step without a model: what comes next is a function of the tokens that are found in the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampler import Sampler, SampleRow
from infer.llm.engine.sequence import RequestState
from infer.llm.engine.sequence import Sequence as Completion
from infer.llm.step.step_shape import StepShape

VOCABULARY, EOS = 61, 2
_ROWS = 509
_POWERS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15, dtype=np.uint64))
_LOGITS = np.random.default_rng(7).normal(0, 3, (_ROWS, VOCABULARY)).astype(np.float32)


class Shape(StepShape, frozen=True):
    """Two layers, a token id of eight bytes per place and layer."""

    @property
    def page_bytes(self) -> int:
        return 8 * self.page


def fake_shape(page: int = 4, positions: int = 256) -> Shape:
    return Shape(
        layers=2,
        query_heads=1,
        kv_heads=1,
        head_dim=1,
        vocab_size=VOCABULARY,
        max_positions=positions,
        page=page,
    )


def logits_after(history: np.ndarray) -> np.ndarray:
    """float32 [vocab] for int64 [length]; any other token at any place gives others."""
    mixed = int(((history.astype(np.uint64) + np.uint64(1)) * _POWERS[: len(history)]).sum())
    return _LOGITS[(mixed >> 20) % _ROWS]


class FakeStep:
    """Writes token ids to the pages of every layer, and reads all of a sequence from them for each row of logits."""

    def __init__(self, page: int = 4) -> None:
        self.page = page
        self.calls: list[tuple[int, int]] = []  # tokens, sequences
        self.poison: set[int] = set()  # tokens at which the model fails

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {name: value.numpy() for name, value in inputs.items()}
        ids, rows, page = named["token_ids"], named["logit_rows"], self.page
        if self.poison & set(ids.tolist()):
            raise RuntimeError("a poisonous token")
        cells = named["kv_cache"].view(np.int64)  # [layers, pages, page]
        places = named["slot_mapping"]
        kept = places >= 0  # the others are padding
        cells[:, places[kept] // page, places[kept] % page] = ids[kept]
        starts, lengths, table = named["query_start"], named["seq_lens"], named["block_table"]
        self.calls.append((len(ids), len(lengths)))
        logits = np.empty((len(rows), VOCABULARY), dtype=np.float32)
        for i, row in enumerate(rows.tolist()):
            owner = int(np.searchsorted(starts, row, side="right")) - 1
            length = int(lengths[owner] - (starts[owner + 1] - 1 - row))
            if named["positions"][row] != length - 1:
                raise AssertionError("a position that is not the last one")
            pages = table[owner, : -(-length // page)]
            layers = cells[:, pages].reshape(2, -1)[:, :length]
            logits[i] = logits_after(layers[0]) if (layers[0] == layers[1]).all() else np.nan
        return {"logits": torch.from_numpy(logits)}


def expected(request: Request, index: int = 0, sampler: Sampler | None = None) -> list[int]:
    """Return what one completion of the request must be, token by token, alone."""
    sampling = request.sampling
    state = RequestState(request, 0, 0.0, 1.0)
    alone = Completion(state, index)
    choose = sampler or Sampler(VOCABULARY, [EOS])
    while alone.num_output_tokens < sampling.max_tokens:
        row = logits_after(np.array(alone.tokens))
        if state.fast_decode and sampling.temperature == 0:
            token = int(row.argmax())
        else:
            token = choose(torch.from_numpy(row.copy())[None], [SampleRow(alone, 0)]).tokens[0]
        alone.tokens.append(token)
        alone.num_output_tokens += 1
        if alone.token_counts is not None:
            alone.token_counts.add(token)
        if token == EOS and not sampling.ignore_eos:
            break
    return alone.tokens[state.prompt_length :]


class FallibleDrafts:
    """Drafts that are right now and then: what follows in truth, with a wrong token at random places."""

    def __init__(self, seed: int, wrong: float = 0.2) -> None:
        self.random, self.wrong = np.random.default_rng(seed), wrong
        self.observed: list[tuple[int, int]] = []

    def open(self, request: Request) -> FallibleDrafts:
        return self

    def draft(self, sequences: Sequence[Completion], limits: Sequence[int]) -> list[list[int]]:
        return [self._after(s.tokens, limit) for s, limit in zip(sequences, limits, strict=True)]

    def would_draft(self, sequence: Completion, limit: int) -> bool:
        return bool(self.random.integers(0, 2))

    def _after(self, tokens: Sequence[int], limit: int) -> list[int]:
        history = list(tokens)
        for _ in range(int(self.random.integers(0, limit + 1))):
            right = int(logits_after(np.array(history)).argmax())
            history.append(
                int(self.random.integers(VOCABULARY)) if self.random.random() < self.wrong else right
            )
        return history[len(tokens) :]

    def observe(self, drafted: int, accepted: int) -> None:
        self.observed.append((drafted, accepted))

    def measured(self, tokens: int, sequences: int, seconds: float) -> None:
        pass
