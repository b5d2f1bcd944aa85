"""Teacher and student as modules of the same inputs and outputs, opened from what the user named."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import NotUsableError, UsageError
from ...load import LoadedModel, fill, load
from ...load.identification.source_names import is_user_module
from ...load.sources.user_module import UserModule
from ...plan import Plan
from .settings import DistilSettings
from .student_model import DEPTH, Student, layer_lists, student_of
from .student_shape import StudentShape, parse_shape


@dataclass
class Pair:
    """A frozen teacher and the student that learns from it.

    `teacher` and `student` take and give the same tensors. `trained` is the student itself: of a model of transformers
    the part without the wrapper, which is what is saved. `layers`: lists of layers whose hidden states correspond.
    """

    loaded: LoadedModel
    teacher: nn.Module
    student: nn.Module
    trained: nn.Module
    made_of: Student | None
    layers: tuple[Sequence[nn.Module], Sequence[nn.Module]] | None = None


def open_pair(settings: DistilSettings) -> Pair:
    """Open the teacher, and open or make the student.

    Raises `UsageError` or `NotUsableError` for a student that does not go with the teacher.
    """
    plan = Plan(
        source=settings.source,
        model=settings.model,
        trust_code=settings.trust_code,
        data="random",
        load="meta",
    )
    loaded = load(plan)
    if loaded.module is None:
        raise NotUsableError(f"a teacher is a torch module; {settings.source} is {loaded.kind}")
    fill(loaded)
    teacher = loaded.module.requires_grad_(False).eval()
    if shape := parse_shape(settings.student):
        return _made(loaded, teacher, shape)
    if is_user_module(settings.student):
        built = UserModule(settings.student).build()
        if not isinstance(built, nn.Module):
            raise UsageError(f"expected a torch module, got {type(built).__name__}", where="--student")
        return Pair(loaded, teacher, built, built, None)
    return _opened(loaded, teacher, settings.student)


def _made(loaded: LoadedModel, teacher: nn.Module, shape: StudentShape) -> Pair:
    if loaded.kind not in ("huggingface", "gguf"):
        raise UsageError(
            f"a student is made of models of transformers, and the teacher is a {loaded.kind}",
            where="--student",
            hint="Name one of yours: --student FILE.py:FACTORY",
        )
    inner = _inner(teacher)
    made = student_of(inner, shape)
    total = getattr(inner.config, DEPTH)
    own, theirs = layer_lists(made.model, len(made.layers)), layer_lists(inner, total)
    layers = None
    if len(own) == len(theirs) == 1:
        blocks: nn.ModuleList = inner.get_submodule(theirs[0])  # type: ignore[assignment]
        mine: nn.ModuleList = made.model.get_submodule(own[0])  # type: ignore[assignment]
        layers = (list(mine), [blocks[i] for i in made.layers])
    return Pair(loaded, teacher, with_model(teacher, made.model), made.model, made, layers)


def _opened(loaded: LoadedModel, teacher: nn.Module, source: str) -> Pair:
    """Open a student from a folder; it has the teacher's task."""
    opened = load(Plan(source=source, data="random", load="meta"))
    if opened.kind != "huggingface" or loaded.kind not in ("huggingface", "gguf"):
        raise UsageError(
            f"expected a Hugging Face folder for a teacher of one, got {opened.kind} for {loaded.kind}",
            where="--student",
        )
    if opened.task != loaded.task:
        raise UsageError(
            f"the student is a model of {opened.task}, the teacher of {loaded.task}", where="--student"
        )
    fill(opened)
    inner = _inner(opened.module)
    for parameter in inner.parameters():  # of mapped files, which are read-only
        parameter.data = parameter.data.to(torch.float32, copy=True)
    return Pair(loaded, teacher, opened.module or inner, inner, None)


def with_model(wrapper: nn.Module, model: nn.Module) -> nn.Module:
    """Return a wrapper of another model that shares everything else, pooling among it, with the given one."""
    made = copy.copy(wrapper)
    made._modules = dict(wrapper._modules)
    made.model = model
    return made


def _inner(wrapper: nn.Module | None) -> nn.Module:
    inner = getattr(wrapper, "model", None)
    if not isinstance(inner, nn.Module):
        raise NotUsableError(f"a {type(wrapper).__name__} has no single model of transformers inside")
    return inner
