"""Server side of the decoder processes, and the messages between both."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np

from ...errors import InputError, NotReadyError
from ...preprocess.image import ImagePreprocessor
from ..workers.messages import ErrorMessage, decode_error
from ..workers.process import ChildProcess, ClosedError

MODULE = "infer.serve.media_decoder"
SECONDS = 120.0  # for one file, until its process is killed


class DecodeImage(msgspec.Struct, tag="image", frozen=True, array_like=True):
    """Server to decoder: decode an image and run its steps; without `steps` its pixels of `channels` come back."""

    data: bytes
    where: str
    max_pixels: int
    channels: int
    steps: ImagePreprocessor | None


class DecodeSound(msgspec.Struct, tag="sound", frozen=True, array_like=True):
    """Server to decoder: decode a sound to one channel of `sampling_rate` (Hz)."""

    data: bytes
    where: str
    sampling_rate: int
    max_seconds: float | None


class DecodedImage(msgspec.Struct, tag="pixels", frozen=True, array_like=True):
    """Decoder to server: height and width of the image, and its pixels uint8 [H, W, C] or name, dtype, shape, bytes of
    the tensors that its steps gave.
    """

    size: tuple[int, int]
    pixels: bytes
    tensors: list[tuple[str, str, tuple[int, ...], bytes]]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensors by name."""
        return {name: np.frombuffer(data, dtype).reshape(shape) for name, dtype, shape, data in self.tensors}


class DecodedSound(msgspec.Struct, tag="samples", frozen=True, array_like=True):
    """Decoder to server: float32 [samples]."""

    samples: bytes


ToDecoder = DecodeImage | DecodeSound
FromDecoder = DecodedImage | DecodedSound | ErrorMessage


class MediaDecoders:
    """Decoder processes, as many as threads call `image` and `sound` at once; started when they are needed.

    `module` is what a process runs.
    """

    def __init__(self, module: str = MODULE) -> None:
        self._module = module
        self._lock, self._idle = threading.Lock(), list[ChildProcess]()
        self._closed = False

    def start(self) -> None:
        """Start one process now, so that the first file need not wait for it."""
        self._put(self._take())

    def image(self, asked: DecodeImage) -> DecodedImage:
        """Decode an image; blocks.

        Raises what decoding raised, and `InputError` for a file on which the process died or took longer than 120 s.
        """
        found: DecodedImage = self._answer(asked)
        return found

    def sound(self, asked: DecodeSound) -> np.ndarray:
        """Decode a sound to float32 [samples]; blocks, and raises as `image` does."""
        return np.frombuffer(self._answer(asked).samples, np.float32)

    def close(self) -> None:
        """End all processes; those at work end after their file."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.kill()

    def _answer(self, asked: DecodeImage | DecodeSound) -> Any:
        process, answer = self._take(), None
        try:
            process.channel.send(asked)
            answer = process.channel.receive(SECONDS)
        except ClosedError as error:
            raise InputError(
                f"the process that decodes files ended ({process.exit}) on this one",
                where=asked.where,
                hint="Write the file again with another program",
            ) from error
        finally:
            if answer is None:
                process.kill()
        if answer is None:
            raise InputError(f"decoding the file took longer than {SECONDS:g} s", where=asked.where)
        self._put(process)
        if isinstance(answer, ErrorMessage):
            raise decode_error(answer)
        return answer

    def _take(self) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise NotReadyError("the server is stopping")
            if self._idle:
                return self._idle.pop()
        return ChildProcess(FromDecoder, module=self._module)

    def _put(self, process: ChildProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.kill()
