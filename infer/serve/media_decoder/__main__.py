"""Decoder process entry point: `python -m infer.serve.media_decoder PARENT CHANNEL`.

It decodes one file after another and ends with its channel. It imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InferError, SourceError, TooLargeError
from ...preprocess.audio import open_sound
from ...preprocess.image import MODES, open_image
from ..workers.messages import encode_error
from ..workers.process import Channel, ClosedError
from .messages import (
    DecodedImage,
    DecodedSound,
    DecodeImage,
    DecodeLimits,
    DecoderReady,
    DecodeSound,
    ToDecoder,
)


def main(arguments: list[str], decode: Callable[[Any], Any] | None = None) -> int:
    """Answer requests until the channel closes; `decode` stands for `decoded`. Return the exit code, 0."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the server handles them
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries write about damaged files
    channel: Channel[Any] = Channel(socket.socket(fileno=int(arguments[1])), ToDecoder)
    try:
        channel.send(DecoderReady())
        while True:
            asked: Any = channel.receive()
            _confine(asked.limits)
            try:
                answer = (decode or decoded)(asked)
            except InferError as error:
                answer = encode_error(error)
            except MemoryError:
                answer = encode_error(_too_large(asked))
            except Exception as error:  # noqa: BLE001 - whatever a library raises, this file alone is refused
                answer = encode_error(_refusal(asked, error))
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.send(answer)
    except ClosedError:
        return 0


def decoded(asked: DecodeImage | DecodeSound) -> DecodedImage | DecodedSound:
    """Decode one file, and run the steps of an image; raise as `open_image`, `open_sound` and the steps do."""
    limits = asked.limits
    if isinstance(asked, DecodeSound):
        samples = open_sound(asked.data, asked.sampling_rate, asked.where, limits.audio_seconds)
        return DecodedSound(_view(samples.astype(np.float32, copy=False)))
    image = open_image(asked.data, asked.where, limits.pixels, limits.scans)
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
    sys.exit(main(sys.argv[1:]))
