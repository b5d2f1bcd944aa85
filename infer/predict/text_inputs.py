"""Text inputs of models that carry a tokenizer: token ids in rows, embeddings, and scores of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..llm.text.embedding_prompts import in_lower_case, with_prompt
from ..llm.text.tokenizer import TextOrPair, Tokenizer
from ..spec import text_padding
from ..tasks import late_interaction
from ..tasks.late_interaction import LateInteraction
from ..tasks.score_activation import activation_of, scores_of
from .tensors import TensorInputs


class TextInputs(TensorInputs):
    """Predictor's methods for text: tokenize, embed, score pairs and rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.padding: dict[str, int] = {}
        self._tokenizer: Tokenizer | None = None
        if (self.path / "tokenizer.json").exists():
            pad_id = int(self.manifest.meta.get("pad_id") or 0)
            self.padding = text_padding(pad_id)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the artifact; raises `UsageError` when it has none."""
        if self._tokenizer is None:
            path = self.path / "tokenizer.json"
            if not path.exists():
                raise UsageError(f"{self.name} takes tensors, not text", hint=f"It expects {self._names()}")
            longest = min(
                int(self.manifest.meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1]
            )
            self._tokenizer = Tokenizer(path, max_length=longest, pad_id=self.padding["input_ids"])
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
        return self._run_texts(with_prompt(texts, self.manifest.meta, prompt_name))

    def embed_tokens(self, texts: list[str], *, role: str = "document") -> list[np.ndarray]:
        """Embed the tokens of texts by a late-interaction model (ColBERT): float32 [tokens, dim] of each text.

        `role`: "query" or "document", which differ in their tokens. Compare them by MaxSim, as `rank` does. Raises
        `UsageError` for another kind of model, and `InputError` for another role.
        """
        if self.task != late_interaction.TASK:
            raise UsageError(f"{self.name} is a {self.task} model, not one of vectors of tokens")
        rules, role = LateInteraction.of(self.manifest.meta), late_interaction.role_of(role, "role")
        prompted: list[TextOrPair] = [rules.text(text, role) for text in texts]
        if self.manifest.meta.get("lower_case"):
            prompted = [in_lower_case(text) for text in prompted]
        longest = self.tokenizer.max_length
        rows = [rules.row(ids, role, longest) for ids in self.tokenizer.encode(prompted)]
        found: list[np.ndarray] = [np.empty(0)] * len(rows)
        wanted = {spec.name for spec in self.inputs}
        for chosen in self._batches([len(row.ids) for row in rows]):
            given = late_interaction.arrays_of([rows[i] for i in chosen], self.padding["input_ids"])
            outputs = self.predict({name: value for name, value in given.items() if name in wanted})
            vectors = outputs[late_interaction.OUTPUT]
            for i, one in zip(
                chosen, late_interaction.compared_vectors(vectors, [rows[i] for i in chosen]), strict=True
            ):
                found[i] = one
        return found

    def score_pairs(self, pairs: Sequence[tuple[str, str]], *, raw: bool = False) -> np.ndarray:
        """Score pairs of texts by a cross-encoder: float32 [len(pairs)].

        The activation of the model's configuration is applied, a sigmoid where it names none; `raw` leaves it out.
        Raises `UsageError` for a model that is no classifier of one label.
        """
        if self.task != "classification" or self.outputs[0].shape[-1] != 1:
            raise UsageError(
                f"{self.name} does not score pairs of texts",
                hint="A cross-encoder does: a sequence classifier of one label",
            )
        logits = self._run_texts(with_prompt(list(pairs), self.manifest.meta))
        return (logits if raw else scores_of(logits, activation_of(self.manifest.meta, 1)))[:, 0]

    def rank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """Return (index of the document, score) for a query, best first; at most `top_n`.

        The score is that of `score_pairs`, of a late-interaction model (ColBERT) MaxSim.
        """
        if self.task == late_interaction.TASK:
            rules, [one] = LateInteraction.of(self.manifest.meta), self.embed_tokens([query], role="query")
            scores = rules.scores(one, self.embed_tokens(list(documents)))
            order = np.argsort(-scores, kind="stable")[:top_n]
            return [(int(index), float(scores[index])) for index in order]
        raw = self.score_pairs([(query, document) for document in documents], raw=True)
        scores = scores_of(raw[:, None], activation_of(self.manifest.meta, 1))[:, 0]
        order = np.argsort(-raw, kind="stable")[
            :top_n
        ]  # a sigmoid in float32 is 1.0 for every logit above 17
        return [(int(index), float(scores[index])) for index in order]

    def _run_texts(self, texts: Sequence[TextOrPair]) -> np.ndarray:
        """Run texts or pairs in batches of similar length; return the first output, float32 [len(texts), width]."""
        wanted = {spec.name for spec in self.inputs}
        rows, types = self.tokenizer.encode_typed(texts)
        result = np.zeros((len(rows), int(self.outputs[0].shape[-1])), dtype=np.float32)
        for chosen in self._batches([len(row) for row in rows]):
            padded = self.tokenizer.pad([rows[i] for i in chosen], [types[i] for i in chosen])
            inputs = {name: value for name, value in padded.items() if name in wanted}
            result[chosen] = self.predict(inputs)[self.outputs[0].name]
        return result

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
