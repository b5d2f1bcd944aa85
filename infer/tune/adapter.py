"""LoRA and QLoRA: adapters of PEFT over a float or packed base, trained and written to a folder of PEFT's format."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..compress.layer_kinds import is_conv1d_of_gpt2
from ..compress.packed_layers import QuantizedLinear
from ..distribution import install
from ..errors import NotUsableError, UsageError, unknown
from ..library_errors import quiet
from ..llm.lora.config import CONFIG, read_config
from ..options import checked
from ..reporter import Reporter
from ..spec import Finding
from .data.packed_sequences import SequenceRows, text_rows
from .language_model import TrainableLanguageModel, open_base
from .memory.technique_table import Technique, TechniqueRow, measure_techniques, techniques
from .objectives.language import NextTokenObjective
from .optimizers import trainable
from .settings import AdapterSettings, TrainSettings
from .training_environment import missing
from .training_folder import TrainingReport, require_free, train_to_folder
from .training_loop import STAGE


def train_adapter(
    settings: AdapterSettings,
    training: TrainSettings,
    output: Path,
    *,
    replace: bool = False,
    reporter: Reporter | None = None,
) -> TrainingReport:
    """Train a LoRA adapter over a frozen base and write it to the folder `output`; return the report in it.

    Checkpoints are in `OUTPUT.checkpoints` until the folder is published. Raises `UsageError` for options,
    `SourceError` for data, `BusyError` where the output exists, and what `train` raises.
    """
    settings, training, reporter = checked(settings), checked(training), reporter or Reporter()
    require_free(output, "adapter_config.json", replace=replace)
    task = _open_task(settings, training, reporter)
    model, data = task.objective.model, (task.objective, task.rows, task.held_out)

    def save(tensors: Mapping[str, Tensor], folder: Path) -> None:
        save_adapter(model, tensors, folder)

    return train_to_folder("tune", settings, training, data, lambda: trainable(model), save, output, reporter)


def plan_adapter(
    settings: AdapterSettings, training: TrainSettings, reporter: Reporter | None = None
) -> list[TechniqueRow]:
    """Plan and measure one step of each technique that changes the memory of a run, which is not started.

    Raises what `train_adapter` raises before its first step.
    """
    settings, training, reporter = checked(settings), checked(training), reporter or Reporter()
    task = _open_task(settings, training, reporter)
    listed = techniques(task.objective, training)
    if task.objective.head is not None:
        listed.append(Technique("whole logits", task.objective.with_whole_logits(), training))
    return measure_techniques(task.rows, listed, reporter)


@dataclass
class _AdapterTask:
    base: TrainableLanguageModel  # keeps mapped weights open
    objective: NextTokenObjective
    rows: SequenceRows
    held_out: SequenceRows | None


def _open_task(settings: AdapterSettings, training: TrainSettings, reporter: Reporter) -> _AdapterTask:
    """Open the base and the data, and insert the adapters."""
    if why := missing():
        raise NotUsableError(why)
    base = open_base(settings.source, settings.base, reporter)
    rows, held_out = text_rows(
        base,
        settings.data,
        settings.length,
        training.seed,
        settings.held_out,
        reporter,
        packing=settings.packing,
    )
    wrapped = add_adapter(base.model, settings)
    objective = NextTokenObjective(wrapped, base.model)
    trained = sum(each.numel() for each in wrapped.parameters() if each.requires_grad)
    found = Finding(STAGE, "trained parameters", trained, "weights", f"rank {settings.lora}")
    reporter.found([*objective.findings, found])
    return _AdapterTask(base, objective, rows, held_out)


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that can have adapters: all but the output layer."""
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [
        name
        for name, layer in model.named_modules()
        if layer is not head and (isinstance(layer, nn.Linear | QuantizedLinear) or is_conv1d_of_gpt2(layer))
    ]


def add_adapter(model: nn.Module, settings: AdapterSettings) -> Any:
    """Insert adapters into the model, in place; return PEFT's wrapper, in which only they are trainable.

    Raises `UsageError` for a layer name that the model does not have.
    """
    if find_spec("peft") is None:
        raise NotUsableError("adapters need the package peft", hint=install("tune"))
    with quiet():  # it imports bitsandbytes, which names kernels that are not installed
        import peft
        from peft.tuners.lora import Linear as LoraLinear

    kinds = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    targets = kinds if settings.lora_layers == "all" else _chosen(settings.lora_layers, kinds)
    config = peft.LoraConfig(
        r=settings.lora,
        lora_alpha=2 * settings.lora if settings.lora_alpha is None else settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=settings.source,
    )
    config._register_custom_module({QuantizedLinear: LoraLinear})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packed layers, whose sizes it reads by name, and of Conv1D
        return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def save_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter's trained tensors as PEFT does, and read its configuration back as serving does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = {"safe_serialization": True, "save_embedding_layers": False}
        model.save_pretrained(folder, state_dict=dict(tensors), **named)
    path = folder / CONFIG
    config = {**json.loads(path.read_text()), "inference_mode": True}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    read_config(folder)


def _chosen(text: str, kinds: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"expected names of layers, got {text!r}", where="--lora-layers")
    for name in names:
        if name not in kinds:
            raise unknown("linear layer", name, kinds)
    return names
