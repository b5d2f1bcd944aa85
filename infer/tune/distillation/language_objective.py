"""Next-token distribution of a student against that of its teacher, with the text itself as a second target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UsageError
from ..losses.cut_cross_entropy import cut_cross_entropy
from ..losses.divergence import cut_divergence
from ..objective import IGNORED
from ..objectives.language_outputs import LanguageOutputs
from ..objectives.layer_outputs import LayerOutputs, hidden_error


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
        layers: tuple[Sequence[nn.Module], Sequence[nn.Module]] | None = None,
    ) -> None:
        self.model = model
        self.student = LanguageOutputs(model)
        self.teacher = LanguageOutputs(teacher.requires_grad_(False).eval())
        self.findings = [*self.student.findings, *self.teacher.findings]
        self.temperature, self.hard = temperature, hard
        self.hidden = hidden if layers is not None else 0.0
        own, theirs = layers if layers is not None and hidden else ((), ())
        self._own, self._theirs = LayerOutputs(own), LayerOutputs(theirs)
        sizes = [each.vocabulary for each in (self.student, self.teacher)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"the student has {sizes[0]} tokens, the teacher {sizes[1]}: they need one tokenizer",
                where="--student",
            )

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, terms = self._distance(batch, self.hard)
        own, theirs = self._own.taken(), self._theirs.taken()
        if self.hidden:
            total = total + self.hidden * terms * hidden_error(own, theirs, batch["labels"] != IGNORED)
        return total, terms

    def measure(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = self._distance(batch, 0.0)
        self._own.taken()
        self._theirs.taken()
        return found

    def _distance(self, batch: dict[str, Tensor], hard: float) -> tuple[Tensor, Tensor]:
        mask = batch["labels"] != IGNORED
        if self.student.head is not None and self.teacher.head is not None:
            with torch.no_grad():
                wanted = self.teacher.hidden_states(batch)
            found = self.student.hidden_states(batch)
            soft, terms = cut_divergence(
                found, self.student.head, wanted, self.teacher.head, mask=mask, temperature=self.temperature
            )
            if not hard:
                return soft, terms
            return (1 - hard) * soft + hard * cut_cross_entropy(found, self.student.head, batch["labels"])[
                0
            ], terms
        with torch.no_grad():
            teacher = (self.teacher.logits(batch)[mask].float() / self.temperature).log_softmax(-1)
        logits = self.student.logits(batch)[mask].float()
        student = (logits / self.temperature).log_softmax(-1)
        soft = F.kl_div(student, teacher, reduction="sum", log_target=True) * self.temperature**2
        if hard:
            soft = (1 - hard) * soft + hard * F.cross_entropy(logits, batch["labels"][mask], reduction="sum")
        return soft, mask.sum()
