"""Worker process entry point: `python -m infer.serve.workers PARENT CHANNEL BUFFER…`.

PARENT is the server's process id; the others are inherited descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ...process import child
from ...process.channel import Channel, ClosedError
from ...process.error_messages import encode_error
from ..served_model import ServedModel
from .loops import run_llm_loop, run_tensor_loop
from .messages import LanguageModelInfo, LoadModel, ToWorker, WorkerReady
from .opening_progress import BEAT_SECONDS, OpeningProgress
from .self_test import warm_up
from .shared_memory import SharedBuffer

if TYPE_CHECKING:
    from ...llm.llm import LanguageModel


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 when told to end, 3 when the model could not be opened."""
    parent, descriptor, *buffers = map(int, arguments)
    phases = {"python": child.process_age()}
    child.ignore_stop_signals()
    child.end_with_parent(parent)
    channel: Channel[Any] = Channel(socket.socket(fileno=descriptor), ToWorker)
    threading.Thread(target=_exit_on_hangup, args=(descriptor,), name="watch", daemon=True).start()
    try:
        return _serve(channel, [SharedBuffer(number, index) for index, number in enumerate(buffers)], phases)
    except ClosedError:
        return 0
    finally:
        gc.unfreeze()  # else the interpreter leaves it where it is, and libraries of torch complain of leaks


def _serve(channel: Channel[Any], buffers: list[SharedBuffer], phases: dict[str, float]) -> int:
    """Open the model, report readiness, and run the loop for its kind; return the exit code."""
    asked = channel.receive()
    if not isinstance(asked, LoadModel):
        return 3
    try:
        progress = OpeningProgress()
        with _heartbeats(channel, progress):
            model, speeds = _open(asked, phases, progress)
        language_model = cast("LanguageModel | None", model.language_model)  # opened in this process
        info = None
        if language_model is not None:
            info = msgspec.convert(language_model, LanguageModelInfo, from_attributes=True)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the server reports it
        channel.send(encode_error(error))
        return 3
    tested = model.tested or language_model is not None
    channel.send(WorkerReady(model.info, info, phases, speeds, tested))
    if language_model is not None:
        return run_llm_loop(language_model, model.close, channel)
    return run_tensor_loop(model, channel, buffers)


def _open(
    asked: LoadModel, phases: dict[str, float], progress: OpeningProgress
) -> tuple[ServedModel, list[tuple[float, float]]]:
    """Return the warm model and the (work, seconds) pairs measured during warm-up."""
    began, source = time.perf_counter(), asked.source
    module, _, name = source.opener.partition(":")
    progress.phase = "importing modules"
    gc.disable()  # modules are no garbage, and torch has so many objects that looking takes a quarter of a second
    try:
        opener: Any = importlib.import_module(module)
    finally:
        gc.enable()
    for part in name.split("."):
        opener = getattr(opener, part)
    imported = time.perf_counter()
    progress.phase = "opening the artifact"
    model: ServedModel = opener(source.path, **source.options)
    model.info = source.named(model.info)
    opened, parts = time.perf_counter(), model.phases
    progress.phase = "warming up"
    speeds = [] if asked.again and model.tested else list(model.warmup())
    if model.language_model is not None:
        speeds = warm_up(model.language_model)
    _freeze_objects()
    phases |= {"import": imported - began, **parts, "open": opened - imported - sum(parts.values())}
    phases["warmup"] = time.perf_counter() - opened
    return model, speeds


def _freeze_objects() -> None:
    """Freeze the objects that exist after loading.

    A full garbage collection that walked all of torch's objects would stall a step by 0.4 s.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # so that the next one comes by what was made since


@contextlib.contextmanager
def _heartbeats(channel: Channel[Any], progress: OpeningProgress) -> Iterator[None]:
    """Send heartbeats from a thread while the model is opened, which may take minutes."""
    over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(ClosedError):
            while not over.wait(BEAT_SECONDS):
                channel.send(progress.heartbeat())

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _exit_on_hangup(descriptor: int) -> None:
    """End the process when the server closes the channel, whatever the main thread is doing."""
    poll = select.poll()
    poll.register(descriptor, 0)  # the end of the other side is reported in any case
    poll.poll()
    time.sleep(1.0)  # the main thread sees it too, and ends in order if it can
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
