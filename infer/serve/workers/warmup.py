"""Warm-up of a language model before its first request."""

from __future__ import annotations

import threading
import time
from typing import Any

from ...errors import InferError
from ...llm.engine.requests import Output, Request
from ...llm.engine.sampling_options import Sampling

PROMPT = 64  # tokens


def generates_text(manifest: Any) -> bool:
    """Return True for the manifest of a language model; any other one is served as tensors."""
    return (getattr(manifest, "meta", None) or {}).get("generation") is not None


def warm_up(driver: Any, context: int) -> list[tuple[int, float]]:
    """Generate two tokens after prompts of 1 and `PROMPT` tokens.

    Returns the size of the second prompt and the seconds to its first token. Raises `InferError` when the
    engine dies.
    """
    prompt = max(min(PROMPT, context // 2), 1)
    _run(driver, 1)
    return [(prompt, _run(driver, prompt))]


def _run(driver: Any, tokens: int) -> float:
    """Generate two tokens; return the seconds to the first one."""
    done, first = threading.Event(), list[float]()
    request = Request(id="warmup", prompt=[0] * tokens, sampling=Sampling(max_tokens=2, ignore_eos=True))

    def hear(outputs: list[Output]) -> None:
        first.append(time.perf_counter())
        if outputs[-1].finish:
            done.set()

    began = time.perf_counter()
    driver.submit(request, hear)
    while not done.wait(0.05):
        if driver.failure is not None:
            raise InferError("the engine died while it warmed up") from driver.failure
    return first[0] - began
