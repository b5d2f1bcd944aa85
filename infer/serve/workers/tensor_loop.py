"""Worker loop of a tensor model: one thread receives, runs and answers batches."""

from __future__ import annotations

import logging
import time
from typing import Any

from ..batching.arrays import run_arrays
from .channel import Channel
from .messages import BatchDone, ErrorMessage, Heartbeat, LoadModel, RunBatch, encode_error
from .self_test import GoldenInputTest
from .shared_memory import SharedBuffer

log = logging.getLogger("infer.serve.workers")
BEAT_SECONDS = 1.0


def loop(predictor: Any, channel: Channel[Any], slabs: list[SharedBuffer]) -> int:
    """Serve until told to end or the self-test fails; return the exit code.

    Raises `ClosedError` when the server process is gone.
    """
    steps, golden = 0, GoldenInputTest(predictor)
    while True:
        asked = channel.receive(BEAT_SECONDS)
        if asked is None:
            try:
                golden.run_if_due()
            except Exception:
                log.critical("the golden inputs fail", exc_info=True)
                return 4
            channel.send(Heartbeat(steps))
        elif isinstance(asked, RunBatch):
            steps += 1
            channel.send(_run(predictor, asked, slabs[asked.slab]))
            golden.timer.restart()
        elif not isinstance(asked, LoadModel):
            predictor.close()
            return 0


def _run(predictor: Any, asked: RunBatch, slab: SharedBuffer) -> BatchDone | ErrorMessage:
    slab.reset(asked.used)
    try:
        inputs = {placed[0]: slab.view(placed) for placed in asked.inputs}
        began = time.monotonic()
        outputs = run_arrays(predictor, inputs)
        seconds = time.monotonic() - began
        return BatchDone([slab.write(name, array) for name, array in outputs.items()], seconds, began)
    except Exception as error:  # noqa: BLE001 - a model may raise anything; the worker goes on
        message = encode_error(error)
        if not message.kind:
            log.exception("a batch failed")
        return message
    finally:
        slab.base = None
