"""Real models that compare weight formats: rows that calibrate, rows that judge, and the error of changed weights.

Both come from transformers, in float32. Every contender hands in weights decoded to float32, which take the place of
the float ones; activations stay float, so that weights alone are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WINDOW, LONGEST = 128, 64  # tokens of a window of the language model, and of a sentence
JUDGED = 64  # windows
CALIBRATION_ROWS = {"pydoc_lm": 256, "minilm": 256}
BATCH = 8
UNUSED = ("pooler.", "embeddings.position_ids")  # of BERT: the embedding is a mean of hidden states


class Decoder(nn.Module):
    """Causal language model: token ids int64 [rows, length] → logits float32 [rows, length, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


@dataclass
class ReferenceModel:
    """A float model with its rows. `metric` names the figure of the plot, `blocks` the prefix of its layers' names."""

    name: str
    folder: Path
    module: nn.Module
    calibration: dict[str, Tensor]
    held_out: dict[str, Tensor]
    task: str
    output: str
    metric: str
    blocks: str

    def batches(self) -> list[dict[str, Tensor]]:
        """Return the calibration rows in batches."""
        return list(_batches(self.calibration))

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters by transformers' names, a tied one once, without those that the output does not need."""
        model: nn.Module = self.module.model  # type: ignore[assignment]
        return {n: p.data for n, p in model.named_parameters() if not n.startswith(UNUSED)}

    def matrices(self, scope: str) -> dict[str, Tensor]:
        """Return the weights that count: all of them ("all"), or the matrices of the blocks ("blocks")."""
        if scope == "all":
            return self.parameters
        return {n: p for n, p in self.parameters.items() if n.startswith(self.blocks) and p.dim() == 2}

    def count(self, scope: str) -> int:
        return sum(p.numel() for p in self.matrices(scope).values())

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Put decoded weights in the place of the float ones; raise `ValueError` for an unknown name or shape."""
        kept = {}
        for name, value in weights.items():
            own = self.parameters.get(name)
            if own is None or own.shape != value.shape:
                raise ValueError(f"expected a parameter of {self.name}, got {name} {list(value.shape)}")
            kept[name] = own.clone()
        try:
            for name, value in weights.items():
                self.parameters[name].copy_(value)
            yield
        finally:
            for name, value in kept.items():
                self.parameters[name].copy_(value)

    @cached_property
    def expected(self) -> list[Tensor]:
        """Float outputs of the held-out rows, in batches."""
        return self.outputs()

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        """Run the module as it is on the held-out rows."""
        return [self.module(**batch) for batch in _batches(self.held_out)]

    def judge(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the figures of decoded weights on the held-out rows."""
        expected = self.expected
        with self.holding(weights):
            return self.compare(expected, self.outputs())

    def compare(self, expected: list[Tensor], got: list[Tensor]) -> dict[str, float]:
        """Return the figures of outputs against the float ones, `metric` among them."""
        if self.task == "text-generation":
            ids = self.held_out["input_ids"].split(BATCH)
            return _of_logits(expected, got, ids)
        return _of_embeddings(torch.cat(expected), torch.cat(got))


def _batches(rows: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    count = len(next(iter(rows.values())))
    for start in range(0, count, BATCH):
        yield {name: value[start : start + BATCH] for name, value in rows.items()}


def _of_logits(expected: list[Tensor], got: list[Tensor], ids: tuple[Tensor, ...]) -> dict[str, float]:
    kl = agree = loss = 0.0
    count = targets = 0
    for want, have, row in zip(expected, got, ids, strict=True):
        p, q = want.log_softmax(-1), have.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).sum())
        agree += int((want.argmax(-1) == have.argmax(-1)).sum())
        loss += float(F.nll_loss(q[:, :-1].flatten(0, 1), row[:, 1:].flatten(), reduction="sum"))
        count, targets = count + row.numel(), targets + row[:, 1:].numel()
    return {"kl": kl / count, "top1": agree / count, "perplexity": math.exp(loss / targets)}


def _of_embeddings(expected: Tensor, got: Tensor) -> dict[str, float]:
    error = float(((got - expected).square().sum() / expected.square().sum()).sqrt())
    return {"relative_error": error, "cosine_distance": float(1 - (got * expected).sum(-1).mean())}


def pydoc_lm() -> ReferenceModel:
    """Return the language model of models/: documents that trained it calibrate, samples.txt judges."""
    from tokenizers import Tokenizer

    import pydoc_lm
    from bench.tune.recovery_texts import documents

    tokenizer = Tokenizer.from_file(str(pydoc_lm.FOLDER / "tokenizer.json"))
    tokens = torch.tensor([t for each in tokenizer.encode_batch(documents()) for t in each.ids])
    windows = tokens.unfold(0, WINDOW, WINDOW)
    chosen = torch.linspace(0, len(windows) - 1, CALIBRATION_ROWS["pydoc_lm"]).long()
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    return ReferenceModel(
        "pydoc_lm", pydoc_lm.FOLDER, Decoder(pydoc_lm.load()).eval(), {"input_ids": windows[chosen].clone()},
        {"input_ids": pydoc_lm.held_out_ids(JUDGED, WINDOW)}, "text-generation", "logits", "kl", "model.layers.",
    )  # fmt: skip


def minilm() -> ReferenceModel:
    """Return the sentence encoder: paragraphs of documentation calibrate, triplets and held-out ones judge."""
    from transformers import AutoTokenizer

    import minilm
    from bench.kernels.whole_models_sources import Embedder
    from bench.tune.recovery_texts import sentences

    folder = minilm.checkpoint_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def rows(texts: list[str]) -> dict[str, Tensor]:
        found = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    return ReferenceModel(
        "minilm", folder, Embedder("sdpa").eval(), rows(sentences()[: CALIBRATION_ROWS["minilm"]]),
        rows(minilm.sentences()), "embedding", "embedding", "relative_error", "encoder.layer.",
    )  # fmt: skip


MODELS = {"pydoc_lm": pydoc_lm, "minilm": minilm}
