"""Next-token cross-entropy of a causal language model, the logits computed in chunks where the head allows it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import NotUsableError
from ..spec import Finding
from .losses.cut_cross_entropy import IGNORED, cut_cross_entropy
from .losses.output_head import OutputHead, check_output_head, output_head


class NextTokenObjective:
    """Sum of the losses of trained tokens; the held-out measure is the same, so its mean is the log perplexity.

    `language_model` is the model of transformers; `model` may be a wrapper of it whose layers it shares. A batch has
    `input_ids`, `position_ids` and `labels`, the token that follows each, int64 [rows, tokens].
    """

    def __init__(self, model: nn.Module, language_model: nn.Module) -> None:
        self.model, self.language_model = model, language_model
        self.takes_positions = "position_ids" in inspect.signature(language_model.forward).parameters
        self.head, self.findings = self._checked_head()

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        if self.head is not None:
            return cut_cross_entropy(self._hidden(batch), self.head, labels)
        logits = self.language_model(**self._inputs(batch)).logits.float()
        flat = labels.flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=IGNORED, reduction="sum")
        return loss, (flat != IGNORED).sum()

    def with_whole_logits(self) -> NextTokenObjective:
        """Return the same objective without chunks of logits, for comparisons of memory."""
        whole = copy.copy(self)
        whole.head = None
        return whole

    def measure(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.loss(batch)

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        names = ("input_ids", "position_ids") if self.takes_positions else ("input_ids",)
        return {**{name: batch[name] for name in names}, "use_cache": False}

    def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
        whole: Any = self.language_model
        return whole.base_model(**self._inputs(batch)).last_hidden_state

    @torch.no_grad()
    def _checked_head(self) -> tuple[OutputHead | None, list[Finding]]:
        """Return the output head if chunks of its logits are the model's own, else None and why."""
        training = self.language_model.training
        self.language_model.eval()
        try:
            head = output_head(self.language_model, "inference")
            ids = torch.arange(4, device=next(self.language_model.parameters()).device)[None]
            batch = {"input_ids": ids, "position_ids": ids}
            logits = self.language_model(**self._inputs(batch)).logits[0]
            check_output_head(head, self._hidden(batch)[0], logits)
        except NotUsableError as error:
            why = f"the whole logits are computed: {error.message}"
            return None, [Finding("train", "cut cross-entropy", False, why=why)]
        finally:
            self.language_model.train(training)
        return head, []
