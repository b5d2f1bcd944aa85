"""Requests of images and sound: where a body holds its files, and the outputs of a model for them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ...errors import InputError, NotUsableError
from ...tasks.media_model import IMAGE_TASKS, SOUND_TASKS, MediaModel
from ..batching.collate import Arrays
from ..batching.tensor_engine import TensorEngine
from ..http.multipart import Form, parse_form
from ..http.request_context import RequestContext, queue_tenant_of
from ..http.routing import NonfiniteError
from ..llm.llm_engine import LLMEngine

MEDIA_TASKS = (*IMAGE_TASKS, *SOUND_TASKS)
INLINE_BYTES = 64 << 10  # a larger form is parsed in a thread
T = TypeVar("T")


async def in_thread(context: RequestContext, function: Callable[..., T], *given: Any) -> T:
    """Call a function in the pool of threads that prepare inputs."""
    return await asyncio.get_running_loop().run_in_executor(context.service.pool, function, *given)


async def read_form(context: RequestContext) -> Form:
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
    """Decode and preprocess files in a thread: the tensors of each, and the height and width of each image."""
    return await in_thread(context, _opened, context, model, files, where)


def _opened(
    context: RequestContext, model: MediaModel, files: Sequence[bytes], where: Sequence[str]
) -> tuple[list[Arrays], list[tuple[int, int]]]:
    tensors, sizes = list[Arrays](), list[tuple[int, int]]()
    for data, place in zip(files, where, strict=True):
        one = open_file(context, model, data, place)
        tensors.append(model.tensors([one]))
        sizes.append((0, 0) if model.reads_sound else (one.height, one.width))
    return tensors, sizes


def open_file(context: RequestContext, model: MediaModel, data: bytes, where: str) -> Any:
    """Decode one file within the server's limits of pixels and seconds."""
    limits = context.service.limits
    return model.open(data, where, max_pixels=limits.max_image_pixels, max_seconds=limits.max_audio_seconds)


async def run_tensors(
    context: RequestContext, engine: TensorEngine, tensors: Sequence[Arrays]
) -> list[dict[str, np.ndarray]]:
    """Run tensors of one row each, those of one shape as one request: the outputs of each row."""
    groups: dict[Any, list[int]] = {}
    for index, arrays in enumerate(tensors):
        groups.setdefault(tuple((name, value.shape) for name, value in arrays.items()), []).append(index)
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
