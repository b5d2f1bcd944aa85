"""Requests of images and sound: where a body holds its files, and the outputs of a model for them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ....errors import InputError, NotUsableError
from ....preprocess.image import MODES, ImagePreprocessor
from ....tasks.media_model import MediaModel
from ...batching.collate import Arrays
from ...batching.tensor_engine import TensorEngine
from ...http.multipart import MultipartForm, parse_form
from ...http.request_context import RequestContext, queue_tenant_of
from ...http.routing import NonfiniteError
from ...llm.llm_engine import LLMEngine
from ...media_decoder.processes import DecodeImage, DecodeSound

INLINE_BYTES = 64 << 10  # a larger form is parsed in a thread
T = TypeVar("T")


async def in_thread(context: RequestContext, function: Callable[..., T], *given: Any) -> T:
    """Call a function in the pool of threads that prepare inputs."""
    return await asyncio.get_running_loop().run_in_executor(context.service.pool, function, *given)


async def read_form(context: RequestContext) -> MultipartForm:
    """Parse the body as a form; a large one in a thread."""
    if len(context.body) <= INLINE_BYTES:
        return parse_form(context.body, context.headers)
    return await in_thread(context, parse_form, context.body, context.headers)


def media_model(engine: TensorEngine | LLMEngine) -> MediaModel:
    """Return the preprocessing and answers of a model of images or sound; raise `NotUsableError` without them."""
    if engine.media is None or engine.media.steps is None:
        raise NotUsableError(
            f"{engine.predictor.name} takes tensors only: its artifact holds no preprocessing",
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
    return await in_thread(context, _opened, context, model, files, where)


def _opened(
    context: RequestContext, model: MediaModel, files: Sequence[bytes], where: Sequence[str]
) -> tuple[list[Arrays], list[tuple[int, int]]]:
    opened = _sound_tensors if model.reads_sound else _image_tensors
    pairs = [opened(context, model, data, place) for data, place in zip(files, where, strict=True)]
    return [tensors for tensors, _ in pairs], [size for _, size in pairs]


def open_sound(context: RequestContext, model: MediaModel, data: bytes, where: str) -> np.ndarray:
    """Decode a sound file in a process of its own, within the server's limit of seconds: float32 [samples]."""
    limit = context.service.limits.max_audio_seconds
    return context.service.decoders.sound(DecodeSound(data, where, model.sampling_rate, limit))


def _sound_tensors(
    context: RequestContext, model: MediaModel, data: bytes, where: str
) -> tuple[Arrays, tuple[int, int]]:
    return model.tensors([open_sound(context, model, data, where)]), (0, 0)


def _image_tensors(
    context: RequestContext, model: MediaModel, data: bytes, where: str
) -> tuple[Arrays, tuple[int, int]]:
    """Decode an image in a process of its own, which also runs infer's own steps; transformers' run here."""
    steps: Any = model.steps
    own = steps if isinstance(steps, ImagePreprocessor) else None
    asked = DecodeImage(data, where, context.service.limits.max_image_pixels, steps.channels, own)
    found = context.service.decoders.image(asked)
    if own is not None:
        return {name: value for name, value in found.arrays().items() if name in model.inputs}, found.size
    from PIL import Image

    height, width = found.size
    image = Image.frombytes(MODES[steps.channels], (width, height), found.pixels)
    return model.tensors([image]), found.size


async def run_tensors(
    context: RequestContext, engine: TensorEngine, tensors: Sequence[Arrays]
) -> list[dict[str, np.ndarray]]:
    """Run tensors of one row each, those of one shape as one request unless rows depend on each other."""
    groups: dict[Any, list[int]] = {}
    for index, arrays in enumerate(tensors):
        alone = () if engine.collator.batched else (index,)
        groups.setdefault((*alone, *((n, value.shape) for n, value in arrays.items())), []).append(index)
    found: list[dict[str, np.ndarray]] = [{} for _ in tensors]
    tenant, timeout = queue_tenant_of(context.service, context.headers), context.timeout()
    for rows in groups.values():
        joined = {name: np.concatenate([tensors[i][name] for i in rows]) for name in tensors[rows[0]]}
        answer = await engine.infer(joined, timeout=timeout, tenant=tenant)
        context.measure = answer.timings
        for name, values in answer.outputs.items():
            if wrong := int((~np.isfinite(values)).sum()):
                raise NonfiniteError(name, wrong)
            for place, row in enumerate(rows):
                found[row][name] = values[place]
    return found
