"""Distillation: a teacher, a student and data, to the student's folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import NotUsableError, UsageError
from ...graph.capture import check_input_names
from ...load import LoadedModel, fill, load
from ...load.heads.text import Decoder, EncoderDecoder
from ...load.identification.source_names import is_user_module
from ...load.samples.read_samples import read_data
from ...load.sources.user_module import UserModule
from ...options import checked
from ...plan import Plan
from ...reporter import Reporter
from ...spec import Finding
from ..data.packed_sequences import text_rows
from ..data.rows import split_rows
from ..language_model import language_model_of
from ..objective import Objective, Rows
from ..objectives.language import LanguageObjective
from ..objectives.outputs import OutputObjective
from ..settings import DistilSettings, TrainSettings
from ..training_environment import missing
from ..training_folder import JSON_FILE, TrainingReport, require_free, train_to_folder
from ..training_loop import STAGE
from .student import DEPTH, Student, StudentShape, layer_lists, parse_shape, student_of
from .student_folder import save_student

MOST_ROWS = 1 << 16  # texts and images that are held in memory


def distil(
    settings: DistilSettings,
    training: TrainSettings,
    output: Path,
    *,
    replace: bool = False,
    reporter: Reporter | None = None,
) -> TrainingReport:
    """Train a student to give its teacher's outputs and write it to the folder `output`; return the report in it.

    Checkpoints are in `OUTPUT.checkpoints` until the folder is published. Raises `UsageError` for options or a student
    that does not fit its teacher, `SourceError` for data, `BusyError` where the output exists, and what `train` raises.
    """
    settings, training, reporter = checked(settings), checked(training), reporter or Reporter()
    if why := missing():
        raise NotUsableError(why)
    require_free(output, JSON_FILE, replace=replace)
    reporter.step("load", settings.source)
    pair = open_pair(settings)
    reporter.found(_sizes(pair))
    data = _task(pair, settings, training, reporter)
    pair.trained.requires_grad_(True)

    def save(tensors: Mapping[str, Tensor], folder: Path) -> None:
        save_student(pair.trained, tensors, pair.loaded, settings.source, folder)

    return train_to_folder(
        "distil", settings, training, data, pair.trained.state_dict, save, output, reporter
    )


def _task(
    pair: Pair, settings: DistilSettings, training: TrainSettings, reporter: Reporter
) -> tuple[Objective, Rows, Rows | None]:
    """Return the loss that goes with the teacher's outputs, and the rows of its inputs."""
    loaded = pair.loaded
    if isinstance(loaded.module, Decoder):
        base = language_model_of(loaded, settings.source)
        rows, held_out = text_rows(
            base, settings.data, settings.length, training.seed, settings.held_out, reporter
        )
        objective = LanguageObjective(
            pair.trained,
            base.model,
            temperature=settings.temperature,
            hard=settings.hard,
            hidden=settings.hidden,
            layers=pair.layers,
        )
        reporter.found(objective.findings)
        return objective, rows, held_out
    if isinstance(loaded.module, EncoderDecoder):
        raise NotUsableError("distillation of encoder-decoder models is not supported")
    if settings.hard:
        raise UsageError("--hard is for language models: other data has no next token", where="--hard")
    samples, source, digest = read_data(settings.data, loaded, most=MOST_ROWS)
    taught, aside = split_rows(samples, settings.held_out, training.seed)
    count = 0 if aside is None else len(aside)
    reporter.found(
        [
            Finding("data", "rows", len(taught), "rows", f"{source}; sha256 {digest}"),
            Finding("data", "held out", count, "rows", "measured, never trained on"),
        ]
    )
    made = OutputObjective(
        pair.student,
        pair.teacher,
        loaded.outputs,
        loaded.task,
        temperature=settings.temperature,
        hidden=settings.hidden,
        layers=pair.layers,
    )
    for module in (pair.teacher, pair.student):
        check_input_names(module, loaded.inputs, "Teacher and student take inputs of equal names")
    _check_outputs(made, taught)
    return made, taught, aside


@torch.no_grad()
def _check_outputs(objective: OutputObjective, rows: Rows) -> None:
    """Raise `UsageError` before training where the outputs of teacher and student can't be compared."""
    objective.model.eval()
    objective.measure(rows.batch([0]))


def _sizes(pair: Pair) -> list[Finding]:
    counts = [_weights(each) for each in (pair.teacher, pair.student)]
    share = counts[1] / max(counts[0], 1)
    found = [Finding(STAGE, "student", counts[1], "weights", f"{share:.0%} of its teacher's {counts[0]}")]
    if pair.made_of is not None:
        layers = ", ".join(map(str, pair.made_of.layers))
        found.append(
            Finding(STAGE, "layers taken", len(pair.made_of.layers), "layers", f"the teacher's {layers}")
        )
    return found


def _weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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
