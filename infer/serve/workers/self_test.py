"""Warm-up of a language model, and idle self-test of a worker on golden inputs.

A worker whose outputs have changed ends itself, and one that gives none any more becomes silent or reports it: the
server watches for that, so that no external health probe needs to run a model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from ... import rows
from ...artifact.model_info import GOLDEN_INPUTS, ModelInfo
from ...errors import ArtifactError, InferError
from ...llm.engine.engine_thread import EngineThread
from ...llm.engine.requests import Output, Request
from ...llm.engine.sampling.sampling_options import Sampling
from ..batching.collate import Arrays
from ..served_model import EngineClient, ServedLanguageModel

PROMPT = 64  # tokens
log = logging.getLogger("infer.serve.workers")
EVERY = 5.0  # seconds without a question from elsewhere
MOST_SHARE = 0.01  # of the time that this may take
PATIENCE = 10.0  # seconds in which tokens must come; after three times as many the worker ends itself
TOLERANCE = 1e-3  # between two answers of one process, relative in norm
MISSES = 3


def warm_up(language_model: ServedLanguageModel) -> list[tuple[float, float]]:
    """Generate two tokens after prompts of 1 and `PROMPT` tokens.

    Returns the size of the second prompt and the seconds to its first token. Raises `InferError` when the
    engine dies.
    """
    prompt = max(min(PROMPT, language_model.context // 2), 1)
    _run(language_model.engine_client, 1)
    return [(prompt, _run(language_model.engine_client, prompt))]


def _run(engine_client: EngineClient, tokens: int) -> float:
    """Generate two tokens; return the seconds to the first one."""
    done, first = threading.Event(), list[float]()
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    request = Request(id="warmup", prompt=[0] * tokens, sampling=sampling, features=b"")

    def collect(outputs: list[Output]) -> None:
        first.append(time.perf_counter())
        if outputs[-1].finish:
            done.set()

    began = time.perf_counter()
    engine_client.submit(request, collect)
    while not done.wait(0.05):
        if engine_client.failure is not None:
            raise InferError("the engine died while it warmed up") from engine_client.failure
    return first[0] - began


class IdleTimer:
    """Schedule of the self-test: after `EVERY` idle seconds, more rarely where the test is slow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._due = clock, clock() + EVERY

    @property
    def due(self) -> bool:
        return self.clock() >= self._due

    def restart(self, timings: float = 0.0) -> None:
        """Restart the timer after work, or after a test that took so many seconds."""
        self._due = self.clock() + max(EVERY, timings / MOST_SHARE)


class GoldenInputTest:
    """Self-test of a tensor model on its artifact's golden inputs; does nothing without them."""

    def __init__(
        self, info: ModelInfo, run: Callable[[Arrays], Arrays], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timer, self._run_model = IdleTimer(clock), run
        self._inputs = _first_row(info)
        self._expected = self._answer()

    def run_if_due(self) -> None:
        """Run the test when idle; raise `ArtifactError` when the outputs have changed."""
        if self._inputs is None or not self.timer.due:
            return
        began = self.timer.clock()
        found = self._answer()
        self.timer.restart(self.timer.clock() - began)
        for name, value in self._expected.items():
            if not outputs_match(found[name], value):
                raise ArtifactError(
                    f"output {name} on the golden inputs differs from the one at the start of this process"
                )

    def _answer(self) -> Arrays:
        if self._inputs is None:
            return {}
        return {name: np.array(value) for name, value in self._run_model(self._inputs).items()}


class GoldenPromptTest:
    """Self-test of a language model: two greedy tokens; call `run_if_due` about twice a second."""

    def __init__(self, engine_client: EngineThread, clock: Callable[[], float] = time.monotonic) -> None:
        self.timer, self._driver = IdleTimer(clock), engine_client
        self._asked_at: float | None = None  # when, if the answer is to come
        self._expected: list[int] = []
        self._tokens: list[int] = []
        self._number = self._misses = 0

    @property
    def answering(self) -> bool:
        """True when the last test ended in time or may still do so."""
        return self._asked_at is None or self.timer.clock() - self._asked_at < PATIENCE

    def run_if_due(self) -> None:
        """Start or check the test; raise `InferError` for changed or missing tokens."""
        if self._asked_at is None and self._tokens:
            self._compare()
        if self._asked_at is not None:
            if self.timer.clock() - self._asked_at > 3 * PATIENCE:
                raise InferError(f"two tokens did not come within {3 * PATIENCE:.0f} s")
        elif self._driver.running:
            self.timer.restart()
        elif self.timer.due:
            self._asked_at, self._tokens, self._number = self.timer.clock(), [], self._number + 1
            sampling = Sampling(max_tokens=2, ignore_eos=True, temperature=0.0)
            self._driver.submit(
                Request(id=f"golden {self._number}", prompt=[0], sampling=sampling, features=b""), self._take
            )

    def _compare(self) -> None:
        """Compare the tokens with the first run's; raise after `MISSES` mismatches in a row.

        One mismatch proves nothing: another request in the same batch may flip a near tie.
        """
        found, self._tokens = self._tokens, []
        self._expected = self._expected or found
        self._misses = 0 if found == self._expected else self._misses + 1
        if self._misses >= MISSES:
            raise ArtifactError("the self-test gets other tokens than when the worker started")

    def _take(self, outputs: list[Output]) -> None:
        """Collect outputs; called on the engine's thread."""
        for output in outputs:
            self._tokens += output.token_ids
            if output.finish is not None and self._asked_at is not None:
                self.timer.restart(self.timer.clock() - self._asked_at)
                self._asked_at = None


def outputs_match(found: np.ndarray, known: np.ndarray) -> bool:
    """Return True for equal integers, or floats within `TOLERANCE` in relative norm."""
    if known.dtype.kind not in "fc":
        return bool(np.array_equal(found, known))
    finite = np.isfinite(known)
    if not np.array_equal(np.isfinite(found), finite):
        return False
    if not np.array_equal(found[~finite], known[~finite], equal_nan=True):
        return False
    now, then = (value[finite].astype(np.complex128) for value in (found, known))
    return bool(np.linalg.norm(now - then) <= TOLERANCE * max(float(np.linalg.norm(then)), 1e-12))


def _first_row(info: ModelInfo) -> Arrays | None:
    from safetensors.numpy import load_file

    file = info.file(GOLDEN_INPUTS)
    if file is None or any(spec.dtype == "bfloat16" for spec in info.inputs):
        return None  # numpy can't hold that
    return rows.cut(info.inputs, load_file(file), 0, 1)
