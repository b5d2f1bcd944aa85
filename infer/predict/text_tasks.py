"""Answers of tasks of texts: labels, entities, spans, masked tokens, choices and vectors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError
from ..llm.text.embedding_prompts import in_lower_case, with_prompt
from ..tasks import answers, late_interaction, text_answers, zero_shot_text
from ..tasks.answers import Answer
from ..tasks.media_model import MediaModel, Preprocessor
from . import raw_inputs
from .text_inputs import TextInputs

TEXT_TASKS = (
    *("classification", "token-classification", "question-answering", "fill-mask", "multiple-choice"),
    "embedding",
    late_interaction.TASK,
)


class TextTasks(TextInputs):
    """Predictor's methods that answer for texts, and what its artifact knows of images and sound."""

    @cached_property
    def media(self) -> MediaModel:
        """Preprocessing and answers of images and sound."""
        return MediaModel.of(self)

    @property
    def preprocessor(self) -> Preprocessor | None:
        """The steps from an image or sound to tensors; None where the artifact holds none."""
        return self.media.steps

    @property
    def labels(self) -> list[str]:
        """Names of the classes; empty where the model has none."""
        return self.media.labels

    def _of_texts(self, rows: list[Any]) -> list[Any]:
        if self.task == "embedding":
            return [answers.unit_vector(row) for row in self.embed(raw_inputs.texts(rows))]
        if self.task == late_interaction.TASK:
            return [{"embeddings": one.tolist()} for one in self.embed_tokens(raw_inputs.texts(rows))]
        if self.task == "question-answering":
            return [self._span(*raw_inputs.question_and_context(row, i)) for i, row in enumerate(rows)]
        if self.task == "multiple-choice":
            return [self._choices(*raw_inputs.question_and_choices(row, i)) for i, row in enumerate(rows)]
        if self.task == "classification" and isinstance(rows[0], dict):
            return [self._zero_shot(row, i) for i, row in enumerate(rows)]
        if self.task == "classification":
            outputs = self._run_texts(with_prompt(rows, self.manifest.meta))
            return [self.media.label_scores(row) for row in outputs]
        texts = raw_inputs.texts(rows)
        lower = bool(self.manifest.meta.get("lower_case"))
        encodings = self.tokenizer.encodings([in_lower_case(text) for text in texts] if lower else texts)
        logits = [one["logits"] for one in self._run_encodings(encodings)]
        if self.task == "token-classification":
            triples = zip(logits, encodings, texts, strict=True)
            return [text_answers.entities(row, one, text, self.labels) for row, one, text in triples]
        mask = self.tokenizer.token_id(str(self.manifest.meta.get("mask_token", "[MASK]")))
        return [
            self._masks(row, one.ids, mask, i)
            for i, (row, one) in enumerate(zip(logits, encodings, strict=True))
        ]

    def _zero_shot(self, row: Any, index: int) -> list[Answer]:
        """Return candidate labels of a text with scores, by a model of entailment."""
        where = f"texts[{index}]"
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise InputError("expected a mapping of text and candidate_labels", where=where)
        labels, sentences = zero_shot_text.hypotheses(
            row.get("candidate_labels"), row.get("hypothesis_template"), where
        )
        entailed = zero_shot_text.entailment(self.labels, where)
        logits = self._run_texts([(text, sentence) for sentence in sentences])
        multi_label = bool(row.get("multi_label"))
        return zero_shot_text.candidate_scores(logits, entailed, labels, multi_label=multi_label)

    def _masks(self, logits: np.ndarray, ids: list[int], mask: int | None, index: int) -> list[list[Answer]]:
        token = self.manifest.meta.get("mask_token", "[MASK]")
        if mask is None or mask not in ids:
            raise InputError(f"expected a text with {token} in it", where=f"texts[{index}]")
        decode = self.tokenizer.decode
        return [
            [one.answer(decode([one.token], False), decode(one.ids, one.alone)) for one in row]
            for row in text_answers.filled_masks(logits, ids, mask, pad_id=self.tokenizer.pad_id)
        ]

    def _span(self, question: str, context: str) -> Answer:
        pieces = self.tokenizer.span_encodings([context], question)
        found = self._run_encodings(pieces)
        pairs = [
            (one["start_logits"], one["end_logits"], row) for one, row in zip(found, pieces, strict=True)
        ]
        return text_answers.best_spans(pairs, context)[0]

    def _run_encodings(self, encodings: list[Any]) -> list[dict[str, np.ndarray]]:
        """Run tokenized texts in batches of similar length; return the outputs of each, padded as its batch was."""
        wanted = {spec.name for spec in self.inputs}
        found: list[dict[str, np.ndarray]] = [{} for _ in encodings]
        for chosen in self._batches([len(one.ids) for one in encodings]):
            padded = self.tokenizer.arrays([encodings[i] for i in chosen])
            outputs = super().predict({name: value for name, value in padded.items() if name in wanted})
            for place, i in enumerate(chosen):
                found[i] = {name: value[place] for name, value in outputs.items()}
        return found

    def _choices(self, question: str, choices: list[str]) -> list[Answer]:
        outputs = self._run_texts([(question, choice) for choice in choices])
        return text_answers.choice_scores(outputs, choices)
