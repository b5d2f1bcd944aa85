"""OpenAI's /v1/models: the served models and adapters."""

from __future__ import annotations

from typing import Literal

import msgspec

from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine
from ...model_lookup import Served, find_model


class Model(msgspec.Struct):
    """A served model.

    `max_model_len`: limit of prompt and completion tokens, null for a model that generates nothing; `parent`:
    the model that an adapter belongs to.
    """

    id: str
    task: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "infer"
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


async def models(context: RequestContext) -> ModelList:
    service = context.service
    found = [_described(name, served) for name, served in service.models.items()]
    return ModelList([*found, *(_described(n, service.models[o], o) for n, o in service.adapters.items())])


async def model(context: RequestContext) -> Model:
    served = find_model(context, context.path["model"])
    return _described(context.path["model"], served, context.model if context.adapter else None)


def _described(name: str, served: Served, parent: str | None = None) -> Model:
    length = served.context if isinstance(served, LLMEngine) else None
    return Model(name, served.info.task, max_model_len=length, parent=parent)
