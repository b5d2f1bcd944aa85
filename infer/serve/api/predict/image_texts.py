"""Texts about images as the server makes them: by captioners and readers of documents (BLIP, TrOCR, Florence-2)."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import InputError
from ....llm.engine.requests import Request
from ... import media_files
from ...generation import image_prompt
from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine
from ...task_call import GenerationCall
from .predict_types import GeneratedText

TASK = "image-to-text"


def find_engine(context: RequestContext, name: str | None, tasks: Sequence[str]) -> LLMEngine | None:
    """Return the engine of a model that writes text about an image; None where `name` is another one's.

    Without a name it is the only one that is served, unless a model of one of `tasks` is served beside it.
    """
    models = context.service.models
    if name is not None:
        found = models.get(name)
        return found if isinstance(found, LLMEngine) and image_prompt.source_of(found) is not None else None
    if any(engine.info.task in tasks for engine in context.service.engines.values()):
        return None
    able = [
        engine for engine in context.service.generators.values() if image_prompt.source_of(engine) is not None
    ]
    if len(able) > 1:
        raise InputError(
            f"expected a model, one of {', '.join(one.info.name for one in able)}", where="model"
        )
    return able[0] if able else None


async def describe(
    context: RequestContext, engine: LLMEngine, files: Sequence[bytes], where: Sequence[str], text: str = ""
) -> list[GeneratedText]:
    """Return the greedy text about each image; `text`: the prompt of each, see `ImageSource`."""
    call = GenerationCall(context, engine, "image-text")
    call.check_admission(len(files))
    model = media_files.media_model(engine)
    source = image_prompt.require_source(engine)
    tokens = await image_prompt.text_tokens(engine, source, text, "parameters.text")
    tensors, _ = await media_files.open_files(context, model, files, where)
    prompt = source.prompt(tokens)
    sampling = source.greedy(prompt, engine.context)
    requests = [
        Request(id="", prompt=prompt, sampling=sampling, features=source.features(one, place))
        for one, place in zip(tensors, where, strict=True)
    ]
    found = await call.generate(requests)
    return [GeneratedText(source.answer(one.text)["generated_text"]) for one in found]
