"""Outputs of a language model of transformers in training: logits, or what its output layer reads."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import NotUsableError
from ...spec import Finding
from ..losses.output_head import OutputHead, check_output_head, output_head


class LanguageOutputs:
    """Calls of a language model on batches of `input_ids` and `position_ids`, int64 [rows, tokens].

    `head` is its output layer where chunks of logits by it are the model's own, else None; `findings` say why.
    """

    def __init__(self, language_model: nn.Module) -> None:
        self.language_model = language_model
        self.takes_positions = "position_ids" in inspect.signature(language_model.forward).parameters
        self.head, self.findings = self._checked_head()

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the whole logits, [rows, tokens, vocab]."""
        found: Tensor = self.language_model(**self._inputs(batch)).logits
        return found

    def hidden_states(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what the output layer reads, [rows, tokens, hidden]."""
        whole: Any = self.language_model
        found: Tensor = whole.base_model(**self._inputs(batch)).last_hidden_state
        return found

    @property
    def vocabulary(self) -> int:
        """Tokens that it gives logits of."""
        whole: Any = self.language_model
        return self.head.vocab if self.head is not None else int(whole.config.get_text_config().vocab_size)

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        names = ("input_ids", "position_ids") if self.takes_positions else ("input_ids",)
        return {**{name: batch[name] for name in names}, "use_cache": False}

    @torch.no_grad()
    def _checked_head(self) -> tuple[OutputHead | None, list[Finding]]:
        """Return the output head if chunks of its logits are the model's own, else None and why."""
        training = self.language_model.training
        self.language_model.eval()
        try:
            head = output_head(self.language_model, "inference")
            ids = torch.arange(4, device=next(self.language_model.parameters()).device)[None]
            batch = {"input_ids": ids, "position_ids": ids}
            check_output_head(head, self.hidden_states(batch)[0], self.logits(batch)[0])
        except NotUsableError as error:
            why = f"the whole logits are computed: {error.message}"
            return None, [Finding("train", "cut cross-entropy", False, why=why)]
        finally:
            self.language_model.train(training)
        return head, []
