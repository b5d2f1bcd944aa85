"""Texts for models that carry a tokenizer: token ids in rows, and the answers of their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError, UsageError
from ..llm.text.embedding_prompts import in_lower_case
from ..llm.text.tokenizer import TextOrPair, Tokenizer
from ..spec import text_padding
from ..tasks import answers, late_interaction, text_answers, text_model, zero_shot_text
from ..tasks.answers import Answer
from ..tasks.steps import (
    Compute,
    Decode,
    Encode,
    EncodeSpans,
    FindTokens,
    Generate,
    Outputs,
    RunRows,
    RunTensors,
    RunTexts,
    Step,
    Steps,
    T,
    perform,
    without_padding,
)
from ..tasks.text_model import TextModel
from . import raw_inputs
from .tensors import TensorInputs

TEXT_TASKS = (
    *("classification", "token-classification", "question-answering", "fill-mask", "multiple-choice"),
    "embedding",
    late_interaction.TASK,
)


class TextInputs(TensorInputs):
    """Predictor's methods for text: tokenize, embed, score pairs, rank and answer; it performs the steps of tasks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tokenizer: Tokenizer | None = None
        if (self.path / "tokenizer.json").exists():
            pad_id = int(self.manifest.meta.get("pad_id") or 0)
            self.padding = text_padding(pad_id)

    @cached_property
    def text_model(self) -> TextModel:
        """The artifact's facts that tasks of texts need."""
        return TextModel.of(self.info)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the artifact; raises `UsageError` when it has none."""
        if self._tokenizer is None:
            path = self.path / "tokenizer.json"
            if not path.exists():
                raise UsageError(f"{self.name} takes tensors, not text", hint=f"It expects {self._names()}")
            longest, pad_id = self.text_model.longest, self.padding["input_ids"]
            self._tokenizer = Tokenizer(path, max_length=longest, pad_id=pad_id)
        return self._tokenizer

    def tokenize(self, texts: Sequence[TextOrPair]) -> dict[str, np.ndarray]:
        """Convert texts to inputs: `input_ids`, `attention_mask` and `token_type_ids`, as far as the model takes them.

        Each is int64 [len(texts), longest], padded. A row may be a pair of texts, such as question and passage. Raises
        `UsageError` for an artifact without a tokenizer.
        """
        wanted = {spec.name for spec in self.inputs}
        if self.manifest.meta.get("lower_case"):
            texts = [in_lower_case(text) for text in texts]
        return {name: value for name, value in self.tokenizer.batch(texts).items() if name in wanted}

    def embed(self, texts: list[str], *, prompt_name: str | None = None) -> np.ndarray:
        """Embed texts: float32 [len(texts), dim]. Texts of similar length run together, `max_batch` at a time.

        `prompt_name`: a prompt of the model, such as "query", put before each text; by default the model's own default.
        Raises `UsageError` for a model that is no embedding model, and `InputError` for a prompt it does not know.
        """
        if self.task != "embedding":
            raise UsageError(f"{self.name} is a {self.task} model, not an embedding model")
        return self._perform(text_model.run_texts(self.text_model, texts, "texts", prompt_name=prompt_name))

    def embed_tokens(self, texts: list[str], *, role: str = "document") -> list[np.ndarray]:
        """Embed the tokens of texts by a late-interaction model (ColBERT): float32 [tokens, dim] of each text.

        `role`: "query" or "document", which differ in their tokens. Compare them by MaxSim, as `rank` does. Raises
        `UsageError` for another kind of model, and `InputError` for another role.
        """
        if self.task != late_interaction.TASK:
            raise UsageError(f"{self.name} is a {self.task} model, not one of vectors of tokens")
        roles = [late_interaction.role_of(role, "role")] * len(texts)
        return self._perform(text_model.embed_tokens(self.text_model, texts, roles, "texts"))

    def score_pairs(self, pairs: Sequence[tuple[str, str]], *, raw: bool = False) -> np.ndarray:
        """Score pairs of texts by a cross-encoder: float32 [len(pairs)].

        The activation of the model's configuration is applied, a sigmoid where it names none; `raw` leaves it out.
        Raises `UsageError` for a model that is no classifier of one label.
        """
        if not self.text_model.scores_pairs:
            raise UsageError(
                f"{self.name} does not score pairs of texts",
                hint="A cross-encoder does: a sequence classifier of one label",
            )
        logits = self._perform(text_model.run_texts(self.text_model, list(pairs), "pairs"))
        return (logits if raw else self.text_model.activated(logits))[:, 0]

    def rank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """Return (index of the document, score) for a query, best first; at most `top_n`.

        The score is that of `score_pairs`, of an embedding model the cosine, of a late-interaction model (ColBERT)
        MaxSim. Raises `UsageError` for another kind of model.
        """
        model = self.text_model
        if not model.scores_pairs and self.task not in ("embedding", late_interaction.TASK):
            raise UsageError(f"{self.name} is a {self.task} model and does not compare texts")
        compared = self._perform(text_model.compare(model, [query], list(documents), "documents"))
        scores = text_model.pair_scores(model, compared)
        return [(place, float(scores[place])) for place in text_model.best_first(compared, top_n)]

    def _of_texts(self, rows: list[Any]) -> list[Any]:
        """Return the answer of the model's task for each of the rows."""
        if self.task == "embedding":
            return [answers.unit_vector(row) for row in self.embed(raw_inputs.texts(rows))]
        if self.task == late_interaction.TASK:
            return [{"embeddings": one.tolist()} for one in self.embed_tokens(raw_inputs.texts(rows))]
        return self._perform(self._steps(rows))

    def _steps(self, rows: list[Any]) -> Steps[list[Any]]:
        model, where = self.text_model, "texts"
        if self.task == "question-answering":
            found = []
            for index, row in enumerate(rows):
                question, context = raw_inputs.question_and_context(row, index)
                found += yield from text_answers.answer_question(model, question, context, f"texts[{index}]")
            return found
        if self.task == "multiple-choice":
            chosen = []
            for index, row in enumerate(rows):
                question, choices = raw_inputs.question_and_choices(row, index)
                chosen.append((yield from text_answers.choose(model, question, choices, f"texts[{index}]")))
            return chosen
        if self.task == "classification" and isinstance(rows[0], dict):
            return (yield from self._zero_shot(rows))
        if self.task == "classification":
            return (yield from text_model.classify(model, rows, where, top=answers.TOP))
        if self.task == "token-classification":
            return (yield from text_answers.tag(model, raw_inputs.texts(rows), where))
        return (yield from text_answers.fill_masks(model, raw_inputs.texts(rows), where))

    def _zero_shot(self, rows: list[Any]) -> Steps[list[list[Answer]]]:
        """Classify each text by the candidate labels beside it."""
        found = []
        for index, row in enumerate(rows):
            where = f"texts[{index}]"
            text = row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise InputError("expected a mapping of text and candidate_labels", where=where)
            labels, template = row.get("candidate_labels"), row.get("hypothesis_template")
            found += yield from zero_shot_text.classify(
                self.text_model,
                [text],
                labels,
                template,
                multi_label=bool(row.get("multi_label")),
                where=where,
                given=where,
            )
        return found

    def _perform(self, steps: Steps[T]) -> T:
        return perform(steps, self._result_of)

    def _result_of(self, step: Step) -> Any:
        match step:
            case RunTexts():
                rows, types = self.tokenizer.encode_typed(step.texts)
                return self._run_rows(RunRows(rows, step.outputs, types))
            case RunRows():
                return self._run_rows(step)
            case Encode():
                return self.tokenizer.encode(step.texts)
            case EncodeSpans():
                return self.tokenizer.span_encodings(step.texts, step.question)
            case FindTokens():
                return [self.tokenizer.token_id(token) for token in step.tokens]
            case Decode():
                return [self.tokenizer.decode(*row) for row in step.rows]
            case Compute():
                return step.function(*step.arguments)
            case RunTensors():
                runs = [super(TextInputs, self).predict(tensors) for tensors in step.tensors]
                return [{name: value[0] for name, value in outputs.items()} for outputs in runs]
            case Generate():
                raise UsageError(f"{self.name} generates no text")

    def _run_rows(self, step: RunRows) -> Outputs:
        """Run rows of tokens in batches of similar length."""
        wanted, lengths = {spec.name for spec in self.inputs}, [len(row) for row in step.rows]
        found: dict[str, list[np.ndarray]] = {name: [np.empty(0)] * len(lengths) for name in step.outputs}
        for chosen in self._batches(lengths):
            padded = step.chosen(chosen).arrays(self.text_model.pad_id)
            outputs = super().predict({name: value for name, value in padded.items() if name in wanted})
            cut = without_padding(step, outputs, self.outputs, [lengths[i] for i in chosen])
            for name, rows in cut.items():
                for place, row in zip(chosen, rows, strict=True):
                    found[name][place] = row
        return found

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of rows of these lengths that run together, by length: see `spec.Joins`."""
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        start = 0
        while start < len(order):
            stop = min(start + self.rows_together, len(order))
            if self.joins == "equal":
                stop = next(
                    (i for i in range(start, stop) if lengths[order[i]] != lengths[order[start]]), stop
                )
            yield order[start:stop]
            start = stop
