"""Process that forks decoders of files: `python -m infer.serve.media_decoder PARENT FD`.

A child decodes one file after another and ends with its channel. It imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...errors import InferError, SourceError, TooLargeError
from ...preprocess.audio import open_sound
from ...preprocess.image import MODES, load_plugins, open_image
from ...process import child
from ...process.channel import Channel, ClosedError
from ...process.error_messages import encode_error
from ...process.forked_children import Jobs, run_fork_server
from .messages import DecodedImage, DecodedSound, DecodeImage, DecodeSound, ToDecoder

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
MAPPED = 1 << 20  # bytes from which memory is returned to the system as soon as it is freed
LIBRARIES = ("soundfile", "soxr")


def main(arguments: list[str], decode: Callable[[Any], Any] | None = None) -> int:
    """Fork decoders until the server closes the socket; `decode` stands for `decoded`."""
    return run_fork_server(arguments, None, lambda _: _prepare(decode or decoded))


def _prepare(decode: Callable[[Any], Any]) -> Jobs:
    with contextlib.suppress(AttributeError, OSError):  # else freed images stay with the process
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)
    for name in LIBRARIES:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    load_plugins()
    return {"decode": partial(_answer_files, decode)}


def _answer_files(decode: Callable[[Any], Any], sock: socket.socket) -> None:
    channel: Channel[DecodeImage | DecodeSound] = Channel(sock, ToDecoder)
    while True:
        try:
            asked = channel.receive()
        except ClosedError:
            return
        child.confine(addresses=asked.limits.memory, cpu_seconds=asked.limits.seconds)
        try:
            answer = decode(asked)
        except InferError as error:
            answer = encode_error(error)
        except MemoryError:
            answer = encode_error(_too_large(asked))
        except Exception as error:  # noqa: BLE001 - whatever a library raises, this file alone is refused
            answer = encode_error(_refusal(asked, error))
        child.unlimit_cpu()
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
