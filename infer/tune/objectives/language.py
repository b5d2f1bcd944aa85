"""Objectives of language models: next tokens, and the distribution of a teacher's next tokens."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import NotUsableError, UsageError
from ...spec import Finding
from ..losses.cut_cross_entropy import cut_cross_entropy
from ..losses.divergence import cut_divergence
from ..losses.output_head import OutputHead, check_output_head, output_head
from ..objective import IGNORED
from .outputs import ComparedLayers, LayerPairs


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


class LanguageObjective:
    """(1 - hard) · KL(teacher ‖ student) + hard · cross-entropy of trained tokens; the held-out measure is the KL.

    A batch has `input_ids`, `position_ids` and `labels`, the token that follows each, int64 [rows, tokens]. Logits are
    computed in chunks where both heads allow it. `layers` and `hidden`: as in `OutputObjective`.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        *,
        temperature: float = 1.0,
        hard: float = 0.0,
        hidden: float = 0.0,
        layers: LayerPairs | None = None,
    ) -> None:
        self.model = model
        self.student = LanguageOutputs(model)
        self.teacher = LanguageOutputs(teacher.requires_grad_(False).eval())
        self.findings = [*self.student.findings, *self.teacher.findings]
        self.temperature, self.hard = temperature, hard
        self.compared = ComparedLayers(layers, hidden)
        sizes = [each.vocabulary for each in (self.student, self.teacher)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"the student has {sizes[0]} tokens, the teacher {sizes[1]}: they need one tokenizer",
                where="--student",
            )

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.compared.added(self._distance(batch, self.hard), batch["labels"] != IGNORED)

    def measure(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        distance = self._distance(batch, 0.0)
        self.compared.drop()
        return distance

    def _distance(self, batch: dict[str, Tensor], hard: float) -> tuple[Tensor, Tensor]:
        mask = batch["labels"] != IGNORED
        if self.student.head is not None and self.teacher.head is not None:
            with torch.no_grad():
                wanted = self.teacher.hidden_states(batch)
            states = self.student.hidden_states(batch)
            soft, terms = cut_divergence(
                states, self.student.head, wanted, self.teacher.head, mask=mask, temperature=self.temperature
            )
            if hard:
                cross_entropy, _ = cut_cross_entropy(states, self.student.head, batch["labels"])
                soft = (1 - hard) * soft + hard * cross_entropy
            return soft, terms
        with torch.no_grad():
            teacher = (self.teacher.logits(batch)[mask].float() / self.temperature).log_softmax(-1)
        logits = self.student.logits(batch)[mask].float()
        student = (logits / self.temperature).log_softmax(-1)
        soft = F.kl_div(student, teacher, reduction="sum", log_target=True) * self.temperature**2
        if hard:
            soft = (1 - hard) * soft + hard * F.cross_entropy(logits, batch["labels"][mask], reduction="sum")
        return soft, mask.sum()
