"""Whisper's transcripts: the prompt of its decoder, and segments from tokens with timestamps.

As in `generate` of transformers, the prompt sets language, task and timestamps; sound longer than 30 s is read in
windows, each of which begins at the last timestamp of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArtifactError, InputError
from ..llm.engine.sampling.whisper_timestamp_rules import TranscriptionRules
from ..regular_files import MAX_JSON, read_regular

STEP = 0.02  # seconds between two timestamps


class Spoken(NamedTuple):
    """A segment of a window: its tokens without timestamps, and seconds from the start of the window."""

    tokens: tuple[int, ...]
    start: float
    end: float


class WhisperTokens:
    """Special tokens of a Whisper checkpoint, from its generation_config.json.

    `start`: the first token of its decoder; `languages`, `tasks`: token by name, empty for a model of English alone.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        try:
            self.start, self.end = int(config["decoder_start_token_id"]), _one(config["eos_token_id"])
            self.no_timestamps = int(config["no_timestamps_token_id"])
            self.languages = {
                str(k).strip("<|>"): int(v) for k, v in (config.get("lang_to_id") or {}).items()
            }
            self.tasks = {str(k): int(v) for k, v in (config.get("task_to_id") or {}).items()}
            self._suppressed = tuple(map(int, config.get("suppress_tokens") or ()))
            self._first = tuple(map(int, config.get("begin_suppress_tokens") or ()))
            self._last_initial = config.get("max_initial_timestamp_index")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"generation_config.json lacks a token of Whisper's prompt: {error}"
            raise ArtifactError(why, where=where, hint="Take it from the original checkpoint") from error

    @classmethod
    def open(cls, folder: Path) -> WhisperTokens:
        """Read Whisper's special tokens from generation_config.json; raise `ArtifactError` where one is absent."""
        path = folder / "generation_config.json"
        if not path.is_file():
            raise ArtifactError("a model that transcribes needs its generation_config.json", where=str(path))
        return cls(json.loads(read_regular(path, MAX_JSON, error=ArtifactError)), str(path))

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def detection(self) -> TranscriptionRules:
        """Rules under which the next token after `start` is the language."""
        return TranscriptionRules(only=tuple(self.languages.values()))

    def rules(self, *, timestamps: bool) -> TranscriptionRules:
        """Return the rules for the tokens of a transcript."""
        return TranscriptionRules(
            suppressed=self._suppressed,
            suppressed_first=self._first,
            timestamps=timestamps,
            first_timestamp=self.first_timestamp,
            last_initial=None if self._last_initial is None else int(self._last_initial),
            end=self.end,
        )

    def language_name(self, token: int) -> str:
        """Return the language code of a language token, "unknown" for other tokens."""
        return next((name for name, number in self.languages.items() if number == token), "unknown")

    def prompt(self, language: str | None, task: str, *, timestamps: bool) -> list[int]:
        """Return the tokens that the decoder begins with; raise `InputError` for an unknown language or task."""
        if not self.languages:
            if language not in (None, "en") or task != "transcribe":
                got = f"language {language!r}, task {task!r}"
                raise InputError(f"this model only transcribes English, got {got}", where="language")
            found = [self.start]
        else:
            if language not in self.languages:
                some = ", ".join(list(self.languages)[:8])
                raise InputError(
                    f"expected a language code such as {some}, got {language!r}", where="language"
                )
            if task not in self.tasks:
                known = " or ".join(self.tasks)
                raise InputError(f"expected the task {known}, got {task!r}", where="task")
            found = [self.start, self.languages[language], self.tasks[task]]
        return found if timestamps else [*found, self.no_timestamps]

    def segments(self, tokens: Sequence[int], seconds: float) -> tuple[list[Spoken], float]:
        """Cut the tokens of a window of `seconds` at pairs of timestamps.

        Returns the segments, and the second of the window at which the next one begins. An unfinished segment at the
        end is left to the next window.
        """
        tokens = [token for token in tokens if token != self.end]
        first = self.first_timestamp
        timed = [token >= first for token in tokens]
        ends = [i + 1 for i in range(len(tokens) - 1) if timed[i] and timed[i + 1]]
        alone = timed[-2:] == [False, True]
        if not ends:
            times = [token for token in tokens if token >= first]
            end = (times[-1] - first) * STEP if times and times[-1] != first else seconds
            return [self._spoken(tokens, 0.0, end)], seconds
        if alone:
            ends.append(len(tokens))
        found, begin = list[Spoken](), 0
        for stop in ends:
            part = tokens[begin:stop]
            found.append(self._spoken(part, (part[0] - first) * STEP, (part[-1] - first) * STEP))
            begin = stop
        return found, seconds if alone else (tokens[begin - 1] - first) * STEP

    def _spoken(self, tokens: Sequence[int], start: float, end: float) -> Spoken:
        return Spoken(tuple(token for token in tokens if token < self.first_timestamp), start, end)


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)
