"""Entry point of the process that forks decoders: `python -m infer.serve.media_decoder FD`.

A child decodes one file after another and ends with its channel. It imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InferError, SourceError, TooLargeError
from ...preprocess.audio import open_sound
from ...preprocess.image import MODES, load_plugins, open_image
from ..fork_server.children import MESSAGE, Children, fork_on_request
from ..fork_server.messages import ForkServerReady
from ..workers.messages import encode_error
from ..workers.process import Channel, ClosedError
from .messages import DecodedImage, DecodedSound, DecodeImage, DecodeLimits, DecodeSound, ToDecoder

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
MAPPED = 1 << 20  # bytes from which memory is returned to the system as soon as it is freed
LIBRARIES = ("soundfile", "soxr")


def main(descriptor: int, decode: Callable[[Any], Any] | None = None) -> int:
    """Fork decoders until the server closes the socket; `decode` stands for `decoded`."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the server handles them
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    control.recv(MESSAGE)  # there is nothing to configure
    with contextlib.suppress(AttributeError, OSError):  # else freed images stay with the process
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)
    for name in LIBRARIES:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    load_plugins()
    children = Children(control, {"decode": partial(_answer_files, decode or decoded)})
    fork_on_request(children, control, ForkServerReady())
    return 0


def _answer_files(decode: Callable[[Any], Any], sock: socket.socket) -> None:
    channel: Channel[Any] = Channel(sock, ToDecoder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        try:
            asked: Any = channel.receive()
        except ClosedError:
            return
        _confine(asked.limits)
        try:
            answer = decode(asked)
        except InferError as error:
            answer = encode_error(error)
        except MemoryError:
            answer = encode_error(_too_large(asked))
        except Exception as error:  # noqa: BLE001 - whatever a library raises, this file alone is refused
            answer = encode_error(_refusal(asked, error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send(answer)


def decoded(asked: DecodeImage | DecodeSound) -> DecodedImage | DecodedSound:
    """Decode one file, and run the steps of an image; raise as `open_image`, `open_sound` and the steps do."""
    limits = asked.limits
    if isinstance(asked, DecodeSound):
        samples = open_sound(asked.data, asked.sampling_rate, asked.where, limits.audio_seconds)
        return DecodedSound(_view(samples.astype(np.float32, copy=False)))
    image = open_image(asked.data, asked.where, limits.pixels, limits.scans, limits.memory)
    size = (image.height, image.width)
    if asked.steps is None:
        return DecodedImage(size, image.convert(MODES[asked.channels]).tobytes(), [])
    tensors = asked.steps.batch([image])
    arrays = [(name, str(value.dtype), value.shape, _view(value)) for name, value in tensors.items()]
    return DecodedImage(size, b"", arrays)


def _view(values: np.ndarray) -> Any:
    """Return the bytes of an array, which are copied only when they are sent."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _confine(limits: DecodeLimits) -> None:
    """Limit the memory that this process takes from here on, and its CPU time, after which SIGPROF ends it."""
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, hard))


def _too_large(asked: DecodeImage | DecodeSound) -> TooLargeError:
    return TooLargeError(
        f"decoding this file takes more than {asked.limits.memory >> 20} MiB of memory",
        where=asked.where,
        hint="Send a smaller one",
    )


def _refusal(asked: DecodeImage | DecodeSound, error: Exception) -> InferError:
    said = f"{type(error).__name__}: {str(error)[:200]}"
    return SourceError(f"the file can't be decoded: {said}", where=asked.where)


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except (ClosedError, OSError):
        sys.exit(0)
