"""Inputs as people have them (texts, pairs, images, sound) and answers of the model's task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..artifact.label_scores import activation_of
from ..errors import ArtifactError, InputError, UsageError
from ..llm.text.embedding_prompts import with_prompt
from ..preprocess.audio import AudioPreprocessor
from ..preprocess.image import ImagePreprocessor, open_image
from ..regular_files import MAX_JSON, read_regular
from . import answers
from .answers import Answer
from .text_inputs import TextInputs

IMAGE_TASKS = ("image-classification", "image-segmentation", "object-detection", "image-embedding")
SOUND_TASKS = ("audio-classification", "automatic-speech-recognition")
TEXT_TASKS = ("classification", "token-classification", "question-answering", "fill-mask", "embedding")
STRIDE = 64  # tokens that two pieces of a long context share


class TaskInputs(TextInputs):
    """Predictor's methods for a task: raw inputs in, answers out."""

    def predict(self, inputs: Any) -> Any:
        """Run one batch of tensors, or answer for raw inputs.

        - A mapping of arrays by input name returns a mapping of arrays by output name.
        - A bare array, for a model of one input, returns a bare array where there is one output.
        - A list of such requests returns the list of their results, batched together where shapes allow.
        - A text, a pair of texts, a mapping with "question" and "context", the path or bytes of an image or sound file,
          a Pillow image, or a list of these, returns the answer of the model's task, as `answer` does.

        Arrays are numpy or torch, of exactly the dtype and shape of `inputs`; results are of the same library, on the
        CPU. Raises `InputError` with the input, what was expected and what came, and `UsageError` after `close`.
        """
        return self.answer(inputs) if _is_raw(inputs) else super().predict(inputs)

    @property
    def answers_task(self) -> bool:
        """True where raw inputs have an answer: the task is known and its preprocessing is in the artifact."""
        return self._why_no_answer() is None

    def answer(self, inputs: Any) -> Any:
        """Answer for one raw input, or for each of a list of them; values are ready for JSON.

        - classification: labels with scores, best first; token-classification: entities of a text.
        - question-answering, of a pair (question, context): the span of the context; fill-mask: tokens of each mask.
        - image-classification, audio-classification: labels; object-detection: boxes in pixels; image-segmentation:
          classes with their share of the area; automatic-speech-recognition: the text.
        - embedding, image-embedding: the vector.

        Raises `UsageError` for a model whose task has no answer, `InputError` and `SourceError` for a bad input.
        """
        if why := self._why_no_answer():
            raise UsageError(f"{self.name} takes tensors only: {why}", hint=f"It expects {self._names()}")
        rows = inputs if isinstance(inputs, list) else [inputs]
        if not rows:
            return []
        kinds = {**dict.fromkeys(IMAGE_TASKS, self._of_images), **dict.fromkeys(SOUND_TASKS, self._of_sounds)}
        found = kinds.get(self.task, self._of_texts)(rows)
        return found if isinstance(inputs, list) else found[0]

    def preprocess(self, rows: Sequence[Any]) -> dict[str, np.ndarray]:
        """Convert image or sound files (or Pillow images) to the model's inputs, and texts by `tokenize`."""
        steps = self.preprocessor
        if isinstance(steps, ImagePreprocessor):
            return steps.batch([_open_image(row, i) for i, row in enumerate(rows)])
        if isinstance(steps, AudioPreprocessor):
            return steps.batch([_open_sound(steps, row, i) for i, row in enumerate(rows)])
        return self.tokenize(rows)

    @cached_property
    def preprocessor(self) -> ImagePreprocessor | AudioPreprocessor | None:
        """The steps from an image or sound to tensors; None where the artifact holds none."""
        found = self.manifest.meta.get("preprocessing")
        if found is None:
            return None
        try:
            if "sampling_rate" in found:
                return msgspec.convert(found, AudioPreprocessor)
            return msgspec.convert(found, ImagePreprocessor)
        except msgspec.ValidationError as error:
            raise ArtifactError(f"the preprocessing can't be read: {error}", where=str(self.path)) from error

    @property
    def labels(self) -> list[str]:
        """Names of the classes; empty where the model has none."""
        return list(self.manifest.meta.get("labels", ()))

    def _why_no_answer(self) -> str | None:
        if self.task in IMAGE_TASKS + SOUND_TASKS:
            return None if self.preprocessor is not None else "its folder had no preprocessing that infer has"
        if self.task not in TEXT_TASKS:
            return f"its task is {self.task}"
        return None if (self.path / "tokenizer.json").exists() else "it holds no tokenizer.json"

    def _of_texts(self, rows: list[Any]) -> list[Any]:
        if self.task == "embedding":
            return [answers.unit_vector(row) for row in self.embed(_texts(rows))]
        if self.task == "question-answering":
            return [self._span(*_question(row, i)) for i, row in enumerate(rows)]
        if self.task == "classification":
            outputs = self._run_texts(with_prompt(rows, self.manifest.meta))
            return [self._label_scores(row) for row in outputs]
        texts = _texts(rows)
        outputs = super().predict(self.tokenize(texts))["logits"]
        encodings = self.tokenizer.encodings(texts)
        if self.task == "token-classification":
            triples = zip(outputs, encodings, texts, strict=True)
            return [answers.entities(row, one, text, self.labels) for row, one, text in triples]
        mask = self.tokenizer.token_id(str(self.manifest.meta.get("mask_token", "[MASK]")))
        return [
            self._masks(row, one.ids, mask, i)
            for i, (row, one) in enumerate(zip(outputs, encodings, strict=True))
        ]

    def _masks(self, logits: np.ndarray, ids: list[int], mask: int | None, index: int) -> list[list[Answer]]:
        token = self.manifest.meta.get("mask_token", "[MASK]")
        if mask is None or mask not in ids:
            raise InputError(f"expected a text with {token} in it", where=f"texts[{index}]")
        return answers.masked_tokens(logits, ids, mask, self.tokenizer)

    def _span(self, question: str, context: str) -> Answer:
        pieces = self.tokenizer.windows(question, context, STRIDE)
        wanted = {spec.name for spec in self.inputs}
        found = super().predict({k: v for k, v in self.tokenizer.arrays(pieces).items() if k in wanted})
        pairs = zip(found["start_logits"], found["end_logits"], pieces, strict=True)
        return answers.best_span(list(pairs), context)

    def _label_scores(self, logits: np.ndarray) -> list[Answer]:
        activation = activation_of(self.manifest.meta, len(logits))
        return answers.label_scores(logits, self.labels, activation)

    def _of_images(self, rows: list[Any]) -> list[Any]:
        images = [_open_image(row, i) for i, row in enumerate(rows)]
        found: list[Any] = []
        one_size = (
            isinstance(self.preprocessor, ImagePreprocessor) and self.preprocessor.output_size is not None
        )
        step = self.max_batch if one_size else 1
        for start in range(0, len(images), step):
            part = images[start : start + step]
            outputs = super().predict(self.preprocess(part))
            sizes = [(image.height, image.width) for image in part]
            found += [
                self._of_image({k: v[i] for k, v in outputs.items()}, size) for i, size in enumerate(sizes)
            ]
        return found

    def _of_image(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Any:
        ways: dict[str, Callable[[], Any]] = {
            "image-classification": lambda: self._label_scores(outputs["logits"]),
            "image-segmentation": lambda: answers.class_areas(outputs["logits"], self.labels),
            "object-detection": lambda: answers.boxes(
                outputs["logits"], outputs["pred_boxes"], size, self.labels
            ),
            "image-embedding": lambda: answers.unit_vector(outputs["embedding"]),
        }
        return ways[self.task]()

    def _of_sounds(self, rows: list[Any]) -> list[Any]:
        """Run sounds one by one: padding would change the answers of a model without mask."""
        steps = self.preprocessor
        found: list[Any] = []
        for index, row in enumerate(rows):
            if not isinstance(steps, AudioPreprocessor):
                raise UsageError(f"{self.name} takes tensors only")
            sound = _open_sound(steps, row, index)
            logits = super().predict(steps.batch([sound]))["logits"][0]
            if self.task == "audio-classification":
                found.append(self._label_scores(logits))
            else:
                vocabulary, blank, delimiter = self._ctc_vocabulary
                found.append(answers.ctc_text(logits, vocabulary, blank, delimiter))
        return found

    @cached_property
    def _ctc_vocabulary(self) -> tuple[dict[str, int], int, str]:
        """Tokens of CTC outputs with their numbers, the number of the blank, and the token between words."""
        path = self.path / "vocab.json"
        if not path.is_file():
            raise UsageError(f"{self.name} holds no vocab.json: its frames have no text", hint="Give tensors")
        found = json.loads(read_regular(path, MAX_JSON, error=ArtifactError))
        if not isinstance(found, dict) or not all(isinstance(number, int) for number in found.values()):
            raise UsageError(
                f"the vocab.json of {self.name} is no table of tokens and numbers", hint="Give tensors"
            )
        meta = self.manifest.meta
        blank = meta.get("pad_id")
        delimiter = str(meta.get("word_delimiter") or "|")
        return found, found.get("<pad>", 0) if blank is None else int(blank), delimiter


def _is_raw(inputs: Any) -> bool:
    """Return true for a text, pair, file or Pillow image, or a list of these; arrays and their mappings are not."""
    if isinstance(inputs, dict):
        return "question" in inputs and isinstance(inputs["question"], str)
    if isinstance(inputs, list):
        return bool(inputs) and _is_raw(inputs[0])
    if isinstance(inputs, tuple):
        return len(inputs) == 2 and all(isinstance(part, str) for part in inputs)
    return isinstance(inputs, str | bytes | Path) or hasattr(inputs, "getbands")


def _texts(rows: Sequence[Any]) -> list[str]:
    for index, row in enumerate(rows):
        if not isinstance(row, str):
            raise InputError(f"expected one text, got {type(row).__name__}", where=f"texts[{index}]")
    return list(rows)


def _question(row: Any, index: int) -> tuple[str, str]:
    pair = (row.get("question"), row.get("context")) if isinstance(row, Mapping) else row
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
        return pair[0], pair[1]
    raise InputError("expected a pair of texts, question and context", where=f"texts[{index}]")


def _open_image(row: Any, index: int) -> Any:
    if isinstance(row, str | Path | bytes) or hasattr(row, "getbands"):
        return open_image(row, "" if isinstance(row, str | Path) else f"images[{index}]")
    raise InputError(f"expected an image file, got {type(row).__name__}", where=f"images[{index}]")


def _open_sound(steps: AudioPreprocessor, row: Any, index: int) -> np.ndarray:
    if isinstance(row, str | Path | bytes):
        return steps.open(row, "" if isinstance(row, str | Path) else f"sounds[{index}]")
    raise InputError(f"expected a sound file, got {type(row).__name__}", where=f"sounds[{index}]")
