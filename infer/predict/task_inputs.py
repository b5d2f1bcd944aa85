"""Inputs as people have them (texts, pairs, images, sound) and answers of the model's task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..spec import ZERO_SHOT_IMAGES
from ..tasks import answers, transcription
from ..tasks.answers import Answer
from ..tasks.image_text import ImageSource
from ..tasks.media_model import IMAGE_TASKS, SOUND_TASKS, MediaModel, Preprocessor
from . import raw_inputs
from .image_texts import image_and_text
from .text_inputs import TEXT_TASKS, TextInputs

GENERATION = "text-generation"


class TaskInputs(TextInputs):
    """Predictor's methods for a task: raw inputs in, answers out."""

    @cached_property
    def media(self) -> MediaModel:
        """Preprocessing and answers of images and sound."""
        return MediaModel(self.info)

    @property
    def preprocessor(self) -> Preprocessor | None:
        """The steps from an image or sound to tensors; None where the artifact holds none."""
        return self.media.steps

    @property
    def labels(self) -> list[str]:
        """Names of the classes; empty where the model has none."""
        return self.media.labels

    def _predict_any(self, inputs: Any) -> Any:
        return self.answer(inputs) if raw_inputs.is_raw(inputs) else super()._predict_any(inputs)

    @property
    def answers_task(self) -> bool:
        """True where raw inputs have an answer: the task is known and its preprocessing is in the artifact."""
        return self._why_no_answer() is None

    def answer(self, inputs: Any) -> Any:
        """Answer for one raw input, or for each of a list of them; values are ready for JSON.

        - classification: labels with scores, best first; of {"text": …, "candidate_labels": […]} these labels, by a
          model of entailment (NLI), with "hypothesis_template" and "multi_label" as in transformers' pipeline.
        - token-classification: entities of a text.
        - question-answering, of a pair (question, context): the span of the context; fill-mask: tokens of each mask.
        - multiple-choice, of {"question": …, "choices": […]} or (question, choice, choice, …): choices with scores.
        - image-classification, audio-classification: labels; object-detection: boxes in pixels; image-segmentation:
          classes with their share of the area; depth-estimation: smallest, largest and mean depth;
          automatic-speech-recognition: the text.
        - text-generation from an image (BLIP, TrOCR, Donut), of an image or {"image": …, "text": …}: "generated_text",
          which begins after the text; from sound (Whisper): the text, its language and its segments with times.
        - embedding, image-embedding, audio-embedding: the vector; multi-vector-embedding: those of a document's tokens.
        - zero-shot-image-classification, of {"image": …, "candidate_labels": […]}: the labels with scores; a
          "hypothesis_template" is the text around a label.

        Raises `UsageError` for a model whose task has no answer, `InputError` and `SourceError` for a bad input.
        """
        if why := self._why_no_answer():
            raise UsageError(f"{self.name} takes tensors only: {why}", hint=f"It expects {self._names()}")
        rows = inputs if isinstance(inputs, list) else [inputs]
        if not rows:
            return []
        if self.task == GENERATION and not self.media.reads_sound:
            pairs = [image_and_text(row, f"images[{i}]") for i, row in enumerate(rows)]
            found = self._described([(self._open(image, i), text) for i, (image, text) in enumerate(pairs)])
            return found if isinstance(inputs, list) else found[0]
        if self.task == GENERATION:
            found = [self._transcript(self._open(row, i)) for i, row in enumerate(rows)]
            return found if isinstance(inputs, list) else found[0]
        kinds = {
            **dict.fromkeys(IMAGE_TASKS, self._of_images),
            ZERO_SHOT_IMAGES: self._of_candidates,
            **dict.fromkeys(SOUND_TASKS, self._of_sounds),
        }
        found = kinds.get(self.task, self._of_texts)(rows)
        return found if isinstance(inputs, list) else found[0]

    def preprocess(self, rows: Sequence[Any]) -> dict[str, np.ndarray]:
        """Convert image or sound files (or Pillow images) to the model's inputs, and texts by `tokenize`.

        A question with choices is one row for each of them.
        """
        if self.task == "multiple-choice":
            asked = [raw_inputs.question_and_choices(row, i) for i, row in enumerate(rows)]
            return self.tokenize([(question, one) for question, choices in asked for one in choices])
        if self.task == ZERO_SHOT_IMAGES:
            return self._candidate_inputs(rows[0], 0)[0]
        if self.preprocessor is None:
            return self.tokenize(rows)
        return self.media.tensors([self._open(row, i) for i, row in enumerate(rows)])

    def _why_no_answer(self) -> str | None:
        media = self.task in IMAGE_TASKS + SOUND_TASKS
        if (media and (self.task != ZERO_SHOT_IMAGES or self.preprocessor is None)) or (
            self.task == GENERATION and (self.media.reads_sound or self._reads_images)
        ):
            return None if self.preprocessor is not None else "its folder had no preprocessing that infer has"
        if self.task not in (*TEXT_TASKS, ZERO_SHOT_IMAGES):
            return f"its task is {self.task}"
        if any(spec.name == "bbox" for spec in self.inputs):
            return "each token needs its box on the page (bbox), which a text does not have"
        return None if (self.path / "tokenizer.json").exists() else "it holds no tokenizer.json"

    def _of_images(self, rows: list[Any]) -> list[Any]:
        images = [self._open(row, i) for i, row in enumerate(rows)]
        found: list[Any] = []
        step = self.rows_together if self.media.output_size is not None else 1
        for start in range(0, len(images), step):
            part = images[start : start + step]
            outputs = super().predict(self.media.tensors(part))
            found += [
                self.media.answer({k: v[i] for k, v in outputs.items()}, one) for i, one in enumerate(part)
            ]
        return found

    def _of_candidates(self, rows: list[Any]) -> list[Any]:
        found = []
        for index, row in enumerate(rows):
            inputs, labels = self._candidate_inputs(row, index)
            found.append(self.media.candidate_scores(super().predict(inputs)["logits"][0], labels))
        return found

    def _candidate_inputs(self, row: Any, index: int) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the inputs of one image and its texts, and the labels of these."""
        where = f"images[{index}]"
        row = raw_inputs.image_and_candidates(row, where)
        labels = row.get("candidate_labels")
        texts = answers.candidate_texts(labels, row.get("hypothesis_template"), where)
        image = self._open(row["image"], index)
        return {**self.media.tensors([image]), **self.tokenize(texts)}, list(labels or ())

    def _of_sounds(self, rows: list[Any]) -> list[Any]:
        """Run sounds one by one: padding would change the answers of a model without mask."""
        found: list[Any] = []
        for index, row in enumerate(rows):
            sound = self._open(row, index)
            if self.task == "automatic-speech-recognition":
                found.append({"text": self._perform(transcription.by_ctc(self.media, sound)).text})
            else:
                outputs = super().predict(self.media.tensors([sound]))
                found.append(self.media.answer({name: value[0] for name, value in outputs.items()}, sound))
        return found

    def _transcript(self, sound: np.ndarray) -> Answer:
        raise UsageError(f"{self.name} generates no text")

    @property
    def _reads_images(self) -> bool:
        """True for a model that writes text about an image."""
        return ImageSource.of(self.manifest.meta) is not None

    def _described(self, rows: list[tuple[Any, str]]) -> list[Answer]:
        raise UsageError(f"{self.name} generates no text")

    def _open(self, row: Any, index: int) -> Any:
        kind = "sounds" if self.media.reads_sound else "images"
        return self.media.open(row, "" if isinstance(row, str | Path) else f"{kind}[{index}]")
