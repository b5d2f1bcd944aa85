"""Decoder process entry point: `python -m infer.serve.media_decoder PARENT CHANNEL`.

It decodes one file after another and ends with its channel. It imports neither torch nor transformers.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import InferError
from ...preprocess.audio import open_sound
from ...preprocess.image import MODES, open_image
from ..workers.messages import encode_error
from ..workers.process import Channel, ClosedError
from .processes import DecodedImage, DecodedSound, DecodeImage, DecodeSound, ToDecoder


def main(arguments: list[str], decode: Callable[[Any], Any] | None = None) -> int:
    """Answer requests until the channel closes; `decode` stands for `decoded`. Return the exit code, 0."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the server handles them
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel: Channel[Any] = Channel(socket.socket(fileno=int(arguments[1])), ToDecoder)
    try:
        while True:
            asked: Any = channel.receive()
            try:
                answer = (decode or decoded)(asked)
            except (InferError, MemoryError) as error:
                answer = encode_error(error)
            channel.send(answer)
    except ClosedError:
        return 0


def decoded(asked: DecodeImage | DecodeSound) -> DecodedImage | DecodedSound:
    """Decode one file, and run the steps of an image; raise as `open_image`, `open_sound` and the steps do."""
    if isinstance(asked, DecodeSound):
        samples = open_sound(asked.data, asked.sampling_rate, asked.where, asked.max_seconds)
        return DecodedSound(np.ascontiguousarray(samples, np.float32).tobytes())
    image = open_image(asked.data, asked.where, asked.max_pixels)
    size = (image.height, image.width)
    if asked.steps is None:
        return DecodedImage(size, image.convert(MODES[asked.channels]).tobytes(), [])
    tensors = asked.steps.batch([image])
    arrays = [(name, str(value.dtype), value.shape, value.tobytes()) for name, value in tensors.items()]
    return DecodedImage(size, b"", arrays)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
