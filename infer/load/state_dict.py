"""Checkpoints of tensors only (`.pt` state dict, `.safetensors`) with the user's model file."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..plan import Plan
from ..spec import Finding
from .loaded_model import LoadedModel
from .meta_model import build_on_meta, match_checkpoint
from .user_module import UserModule
from .weights import DictReader, FiniteReader, WeightReader, num_bytes
from .weights.containers import refuse_expanded, strip_prefixes, unwrap
from .weights.safetensors_reader import SafetensorsReader
from .weights.torch_reader import TorchReader, load_safely


def load_state_dict(plan: Plan, kind: str) -> tuple[LoadedModel, UserModule]:
    """Build `plan.model` on meta and check every name and shape against the checkpoint; no samples yet."""
    path = Path(plan.source)
    reader, notes = open_checkpoint(path, kind)
    if plan.model is None:
        raise UsageError(
            f"{path.name} {describe(reader)}: weights without the model's code",
            where=str(path),
            hint="Give the Python file and the function that builds the model: --model net.py:build",
        )
    user_module = UserModule(plan.model)
    module, findings = build_on_meta(user_module.build, user_module.text)
    fit = match_checkpoint(module, reader)
    fit.check(str(path), strict=True)
    findings += [Finding("load", "checkpoint", text) for text in notes]
    findings.append(Finding("load", "weights", num_bytes(reader) / 1e6, "MB", describe(reader)))
    loaded = LoadedModel(
        kind="safetensors" if kind == "safetensors" else "state-dict",
        module=module,
        reader=FiniteReader(reader, str(path)),
        inputs=user_module.inputs,
        samples={},
        samples_from="",
        outputs=user_module.outputs,
        task=user_module.task,
        renames=fit.renames,
        weight_bytes=num_bytes(reader),
        findings=findings,
        rebuild=lambda: build_on_meta(user_module.build, user_module.text)[0],
    )
    return loaded, user_module


def open_checkpoint(path: Path, kind: str) -> tuple[WeightReader, list[str]]:
    """Open the reader of a checkpoint kind; also return what was unwrapped or stripped."""
    if kind == "safetensors":
        return SafetensorsReader(path), []
    if kind == "state-dict":
        reader = TorchReader(path, verify=True)
        return reader, reader.notes
    tensors, notes = unwrap(load_safely(path), str(path))
    refuse_expanded(tensors, str(path))
    tensors, stripped = strip_prefixes(tensors)
    return DictReader(tensors), [*notes, *stripped, "the format of torch before 1.6: read whole into memory"]


def describe(reader: WeightReader) -> str:
    """Summarize a checkpoint: `holds 34 tensors, first fc1.weight [128, 64]`."""
    names = reader.names()
    if not names:
        return "holds no tensors"
    return f"holds {len(names)} tensors, first {names[0]} {list(reader.shape(names[0]))}"
