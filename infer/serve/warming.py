"""What is done before the first request, so that it pays for nothing."""

from __future__ import annotations

import threading
from typing import Any

from ..errors import InferError
from ..generate.requests import Request, Sampling


def generates(manifest: Any) -> bool:
    """Whether the artifact holds the step of a language model; else it is served as tensors."""
    return (getattr(manifest, "meta", None) or {}).get("generation") is not None


def warm(driver: Any) -> None:
    """Two tokens of any text; raises `InferError` when the engine dies of them."""
    done = threading.Event()
    request = Request(id="warmup", prompt=[0], sampling=Sampling(max_tokens=2, ignore_eos=True))
    driver.submit(request, lambda outputs: done.set() if outputs[-1].finish else None)
    while not done.wait(0.05):
        if driver.failure is not None:
            raise InferError("the engine died while it warmed up") from driver.failure
