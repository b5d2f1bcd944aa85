"""The worker's loop over batches of tensors. One thread: a batch comes, runs, is answered."""

from __future__ import annotations

import logging
import time
from typing import Any

from ..batching.run_arrays import run_arrays
from .channel import Channel
from .messages import Beat, Done, Failed, Open, Run, failed
from .self_test import GoldenBatch
from .shared_memory import Slab

log = logging.getLogger("infer.serve.workers")
BEAT_SECONDS = 1.0


def loop(predictor: Any, channel: Channel[Any], slabs: list[Slab]) -> int:
    """Until told to end, or its answers are wrong; the exit code. Raises `ClosedError` when the front is gone."""
    steps, golden = 0, GoldenBatch(predictor)
    while True:
        asked = channel.receive(BEAT_SECONDS)
        if asked is None:
            try:
                golden.look()
            except Exception:
                log.critical("the golden inputs fail", exc_info=True)
                return 4
            channel.send(Beat(steps))
        elif isinstance(asked, Run):
            steps += 1
            channel.send(_run(predictor, asked, slabs[asked.slab]))
            golden.rest.begin()
        elif not isinstance(asked, Open):
            predictor.close()
            return 0


def _run(predictor: Any, asked: Run, slab: Slab) -> Done | Failed:
    slab.begin(asked.used)
    try:
        inputs = {placed[0]: slab.at(placed) for placed in asked.inputs}
        began = time.monotonic()
        outputs = run_arrays(predictor, inputs)
        seconds = time.monotonic() - began
        return Done([slab.put(name, array) for name, array in outputs.items()], seconds, began)
    except Exception as error:  # noqa: BLE001 - a model may raise anything; the worker goes on
        message = failed(error)
        if not message.kind:
            log.exception("a batch failed")
        return message
    finally:
        slab.whole = None
