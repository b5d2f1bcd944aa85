"""Next-token cross-entropy of a causal language model, the logits computed in chunks where the head allows it."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn import functional as F

from ..losses.cut_cross_entropy import cut_cross_entropy
from ..objective import IGNORED
from .language_outputs import LanguageOutputs


class NextTokenObjective(LanguageOutputs):
    """Sum of the losses of trained tokens; the held-out measure is the same, so its mean is the log perplexity.

    `language_model` is the model of transformers; `model` may be a wrapper of it whose layers it shares. A batch has
    `input_ids`, `position_ids` and `labels`, the token that follows each, int64 [rows, tokens].
    """

    def __init__(self, model: nn.Module, language_model: nn.Module) -> None:
        super().__init__(language_model)
        self.model = model

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        if self.head is not None:
            return cut_cross_entropy(self.hidden_states(batch), self.head, labels)
        flat = labels.flatten()
        logits = self.logits(batch).float().flatten(0, 1)
        loss = F.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum")
        return loss, (flat != IGNORED).sum()

    def measure(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.loss(batch)

    def with_whole_logits(self) -> NextTokenObjective:
        """Return the same objective without chunks of logits, for comparisons of memory."""
        whole = copy.copy(self)
        whole.head = None
        return whole
