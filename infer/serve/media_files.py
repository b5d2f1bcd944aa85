"""Requests of images and sound: where a body holds its files, and the outputs of a model for them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from ..errors import InputError, NotUsableError, TooLargeError
from ..preprocess.image import MODES, ImagePreprocessor
from ..tasks.media_model import MediaModel
from .batching.collate import Arrays
from .batching.tensor_engine import TensorEngine
from .http.multipart import MultipartForm, parse_form
from .http.request_context import RequestContext
from .llm.llm_engine import LLMEngine
from .media_decoder.messages import DecodeImage, DecodeLimits, DecodeSound

INLINE_BYTES = 64 << 10  # a larger form is parsed in a thread
TRANSFORMERS_PIXELS = 1 << 24  # of an image whose steps transformers runs, in the server's own process
T = TypeVar("T")


async def read_form(context: RequestContext) -> MultipartForm:
    """Parse the body as a form; a large one in a thread."""
    if len(context.body) <= INLINE_BYTES:
        return parse_form(context.body, context.headers)
    loop, pool = asyncio.get_running_loop(), context.service.pool
    return await loop.run_in_executor(pool, parse_form, context.body, context.headers)


def media_model(engine: TensorEngine | LLMEngine) -> MediaModel:
    """Return the preprocessing and answers of a model of images or sound; raise `NotUsableError` without them."""
    if engine.media is None or engine.media.steps is None:
        raise NotUsableError(
            f"{engine.info.name} takes tensors only: its artifact holds no preprocessing",
            hint="Send tensors to /v2/models/NAME/infer",
        )
    return engine.media


def from_base64(text: str, where: str) -> bytes:
    """Decode base64, or a data URL of it; raise `InputError` for anything else."""
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InputError("expected a data URL with base64", where=where)
    elif text.startswith(("http://", "https://", "file:")):
        raise InputError("expected base64 data, got an address; addresses are not fetched", where=where)
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError("expected a file as base64", where=where) from error
    if not found:
        raise InputError("expected a file that is not empty", where=where)
    return found


async def open_files(
    context: RequestContext, model: MediaModel, files: Sequence[bytes], where: Sequence[str]
) -> tuple[list[Arrays], list[tuple[int, int]]]:
    """Decode and preprocess files: the tensors of each, and the height and width of each image."""
    tensors, sizes = list[Arrays](), list[tuple[int, int]]()
    for data, place in zip(files, where, strict=True):
        if model.reads_sound:
            sound = await open_sound(context, model, data, place, context.timeout())
            found, size = await run_slow(context, context.timeout(), model.tensors, [sound]), (0, 0)
        else:
            found, size = await _image_tensors(context, model, data, place)
        tensors.append(found)
        sizes.append(size)
    return tensors, sizes


async def run_slow(context: RequestContext, timeout: float, function: Callable[..., T], *given: object) -> T:
    """Call a function that takes its time with a file, in one of the threads for that."""
    return await context.service.decoders.run(context.tenant, timeout, function, *given)


async def open_sound(
    context: RequestContext, model: MediaModel, data: bytes, where: str, timeout: float
) -> np.ndarray:
    """Decode a sound file in a process of its own, within the server's limits: float32 [samples]."""
    asked = DecodeSound(_checked(context, data, where), where, model.sampling_rate, _limits(context))
    return await context.service.decoders.sound(asked, context.tenant, timeout)


async def _image_tensors(
    context: RequestContext, model: MediaModel, data: bytes, where: str
) -> tuple[Arrays, tuple[int, int]]:
    """Decode an image in a process of its own, which also runs infer's own steps; transformers' run here."""
    steps: Any = model.steps
    own = steps if isinstance(steps, ImagePreprocessor) else None
    limits = _limits(context)
    if own is None:
        limits = structs.replace(limits, pixels=min(limits.pixels, TRANSFORMERS_PIXELS))
    asked = DecodeImage(_checked(context, data, where), where, steps.channels, own, limits)
    found = await context.service.decoders.image(asked, context.tenant, context.timeout())
    if own is not None:
        return {name: value for name, value in found.arrays().items() if name in model.inputs}, found.size

    def tensors() -> Arrays:
        from PIL import Image

        height, width = found.size
        return model.tensors([Image.frombytes(MODES[steps.channels], (width, height), found.pixels)])

    return await run_slow(context, context.timeout(), tensors), found.size


def _checked(context: RequestContext, data: bytes, where: str) -> bytes:
    if len(data) > (most := context.service.limits.max_file_bytes):
        raise TooLargeError(f"expected a file of at most {most} bytes, got {len(data)}", where=where)
    return data


def _limits(context: RequestContext) -> DecodeLimits:
    limits = context.service.limits
    return DecodeLimits(
        limits.max_image_pixels,
        limits.max_image_scans,
        limits.max_audio_seconds,
        limits.max_decode_bytes,
        limits.decode_seconds,
    )
