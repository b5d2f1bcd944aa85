"""Model that answers a request: by its name, or the only one that can where the request names none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeGuard, TypeVar

from ..errors import InputError, NotFoundError
from .batching.tensor_engine import TensorEngine
from .http.request_context import RequestContext
from .llm.llm_engine import LLMEngine

Served = TensorEngine | LLMEngine
Able = TypeVar("Able", bound=Served)


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


def find_model(context: RequestContext, name: str) -> Served:
    """Return the served model of that name, or the one with an adapter of that name.

    Raises `ModelNotFoundError`.
    """
    model = context.service.models.get(name)
    if model is None and (owner := context.service.adapters.get(name)) is not None:
        context.adapter, name = name, owner
        model = context.service.models.get(owner)
    if model is None:
        served = ", ".join([*context.service.models, *context.service.adapters])
        raise ModelNotFoundError("no such model is served", hint=f"Served: {served}")
    context.model = name
    return model


def find_able(
    context: RequestContext, name: str | None, able: Callable[[Served], TypeGuard[Able]], purpose: str
) -> Able:
    """Return the model of that name; without a name, the only one that is `able`.

    Raises `NotFoundError`, and `InputError` for a model that is not able or for a choice that the request leaves open.
    """
    if name is None:
        names = [known for known, model in context.service.models.items() if able(model)]
        if not names:
            raise NotFoundError(f"no model that can {purpose} is served", hint="/v2/models lists the models")
        if len(names) > 1:
            raise InputError(f"expected a model, one of {', '.join(names)}", where="model")
        name = names[0]
    model = find_model(context, name)
    if able(model):
        return model
    raise InputError(f"{name} is a {model.info.task} model and can't {purpose}", where="model")


def find_tensor_model(
    context: RequestContext, name: str | None, tasks: Collection[str], purpose: str
) -> TensorEngine:
    """Return the engine of a tensor model of one of these tasks; raises as `find_able` does."""

    def able(model: Served) -> TypeGuard[TensorEngine]:
        return isinstance(model, TensorEngine) and model.info.task in tasks

    return find_able(context, name, able, purpose)


def find_llm(context: RequestContext, name: str) -> LLMEngine:
    """Return the language model of that name; raise `ModelNotFoundError`, or `InputError` for another kind."""
    model = find_model(context, name)
    if not isinstance(model, LLMEngine):
        task = model.info.task
        raise InputError(f"{name} is a model for {task} and generates no text", where="model")
    return model
