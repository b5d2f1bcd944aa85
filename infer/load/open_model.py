"""Entry point of loading: dispatch by the identified kind of source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import rows
from ..errors import UsageError
from ..hub import fetch_source
from ..plan import Plan
from ..reporter import Reporter
from ..spec import BATCH, DECODER_IDS, Finding
from .identification.identify import STATE_DICTS, Identified, identify
from .identification.source_names import describing_folder, is_library_name, is_user_module, whole_source
from .input_specs import bounds, resolve_inputs
from .loaded_model import LoadedModel
from .samples import read_samples
from .sources.user_module import UserModule
from .weight_loading.fill_weights import resolve_strategy

if TYPE_CHECKING:
    from .samples.fatal_sizes import InputTrials

FOLDERS = ("huggingface", "gguf", "timm", "diffusers")  # a GGUF file stands for one
HINTS = {
    "module": "Save model.state_dict() and give --model file.py:factory, or pass --trust-code to run it",
    "torchscript": "Save model.state_dict() and give --model file.py:factory, or pass --trust-code to run it",
    "exported": "Opening a .pt2 can run code. Pass --trust-code when you or someone you trust made it",
}


def load(
    plan: Plan,
    *,
    calibrates: bool | None = None,
    tried: Callable[[LoadedModel], InputTrials | None] | None = None,
    in_memory: LoadedModel | None = None,
    reporter: Reporter | None = None,
) -> LoadedModel:
    """Identify `plan.source` by content and open it; raise `SourceError`, or `UsageError` for a missing option.

    A name of the Hub is downloaded first, which `reporter` is told of; the plan of the caller keeps the name.

    Weights are not in memory afterwards: parameters are on meta until `fill` or a quantizer reads them. `calibrates`:
    whether rows of the samples are split off for calibration; None: where the plan quantizes. `tried` makes what tells
    whether the model takes inputs that are made here, where its user gives none. `in_memory`: a module of the user's
    program, which is the source; `plan.source` is then only its name.
    """
    if in_memory is not None:
        loaded, user_module = in_memory, None
    else:
        plan, loaded, user_module = _identify_and_open(plan, reporter)
    findings = list(loaded.findings)
    inputs, size, sizes = loaded.inputs, loaded.weight_bytes, dict(loaded.sizes)
    if loaded.module is not None:
        inputs, proposed = resolve_inputs(plan, inputs, loaded.module)
        findings += proposed
        if rows.takes_one(
            [spec.shape for spec in inputs]
        ):  # of which several run one by one where they are independent
            inputs, sizes = rows.with_batch(inputs), {**sizes, BATCH: (1, 1)}
        if size is None:
            tensors = (*loaded.module.parameters(), *loaded.module.buffers())
            size = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    choice = resolve_strategy(plan, loaded)
    findings.append(Finding("load", "strategy", choice.value, why=choice.reason))
    loaded = replace(
        loaded,
        inputs=inputs,
        sizes=bounds(inputs, plan) | sizes,
        weight_bytes=size,
        load=choice.value,
        findings=tuple(findings),
    )
    if loaded.preprocessor is not None and any(spec.name == DECODER_IDS for spec in inputs):
        from .samples.transcript_samples import decode_greedily

        loaded = replace(loaded, decode_greedily=partial(decode_greedily, loaded))
    return read_samples.with_samples(plan, loaded, user_module, calibrates=calibrates, tried=tried)


def _identify_and_open(plan: Plan, reporter: Reporter | None) -> tuple[Plan, LoadedModel, UserModule | None]:
    """Open a file, folder or name; the plan names the file that was downloaded, and the whole model of an index."""
    _refuse_weights(plan)
    fetched = fetch_source(plan.source, reporter)
    plan = plan.with_(source=str(fetched.path))
    if not is_user_module(plan.source):
        plan = plan.with_(source=str(whole_source(fetched.path)))
    identified = identify(Path(plan.source))
    if identified.file is not None:
        plan = plan.with_(source=str(identified.file))
    if identified.code and not plan.trust_code:
        raise identified.refused(plan.source, HINTS[identified.kind.removeprefix("legacy-")])
    loaded, user_module = _open(plan, identified)
    findings = [
        Finding("load", "source", identified.kind, why=identified.says),
        *fetched.findings,
        *loaded.findings,
    ]
    if identified.code:
        why = f"it names {', '.join(identified.globals[:8])}" if identified.globals else identified.says
        findings.append(Finding("load", "trusted code", True, why=f"--trust-code was given; {why}"))
    return plan, replace(loaded, findings=tuple(findings)), user_module


def _open(plan: Plan, identified: Identified) -> tuple[LoadedModel, UserModule | None]:
    """Open a source by its kind, with the user's file that builds it or tells of it; only what opens it is imported."""
    kind = identified.kind
    _refuse_names(plan, identified)
    by_name = kind in STATE_DICTS and is_library_name(plan.model or "")
    if kind == "library" or by_name:
        from .model_libraries.open_library import load_library_model

        name, weights = (plan.model or "", plan.source) if by_name else (plan.source, plan.weights)
        return load_library_model(plan, name, weights), None
    if kind in FOLDERS:
        return _open_folder(plan, kind), None
    if kind in STATE_DICTS:
        from .sources.state_dict_source import load_state_dict

        return load_state_dict(plan, kind)
    if kind == "recipe":
        from .sources.python_sources import load_user_module

        user_module = UserModule(plan.source)
        return load_user_module(user_module), user_module
    beside = UserModule(plan.model) if plan.model else None
    return _open_file(plan, kind, beside), beside


def _open_file(plan: Plan, kind: str, user_module: UserModule | None) -> LoadedModel:
    if kind == "onnx":
        from .sources.onnx_file import load_onnx

        return _described(plan, load_onnx(plan))
    if kind == "openvino":
        from .sources.openvino_ir import load_openvino

        return _described(plan, load_openvino(plan))
    if kind == "torchscript":
        from .sources.torchscript import load_torchscript

        return load_torchscript(plan, user_module)
    if kind == "exported":
        from .sources.exported_program import load_exported

        return load_exported(plan)
    from .sources.python_sources import load_pickled

    return load_pickled(plan, user_module)


def _described(plan: Plan, loaded: LoadedModel) -> LoadedModel:
    """Give a file the task of the folder that describes it, where one does."""
    folder = describing_folder(Path(plan.source))
    if folder is None or loaded.directory is not None:
        return loaded
    from .sources.described_file import described

    return described(plan, loaded, folder)


def _open_folder(plan: Plan, kind: str) -> LoadedModel:
    """Open a folder that describes its model; a GGUF file through the one that stands for it, which lives as long as
    the result.
    """
    if kind == "diffusers":
        from .diffusers_models.open_part import load_diffusers_part

        return load_diffusers_part(plan)
    if kind == "timm":
        from .model_libraries.open_library import load_timm_folder

        return load_timm_folder(plan)
    from .sources.huggingface import load_huggingface

    if kind == "huggingface":
        return load_huggingface(plan)
    from .gguf.open_gguf import open_gguf

    source = open_gguf(Path(plan.source))
    loaded = load_huggingface(plan.with_(source=str(source.folder)), source.weights, plan.source)
    return replace(
        loaded,
        kind="gguf",
        weight_bytes=source.num_bytes,
        directory=source.directory,
        stored_as=source.stored_as,
        findings=(source.finding, *loaded.findings),
    )


def _refuse_names(plan: Plan, identified: Identified) -> None:
    """Raise `UsageError` for an option about a state dict, its names or its --model, where the source is none."""
    if plan.model and identified.kind in (*FOLDERS, "recipe"):
        raise UsageError(f"{plan.source} is a model already", where="--model", hint="Leave --model out")
    if identified.kind in (*STATE_DICTS, "library"):
        return
    takes_key = identified.kind in ("module", "legacy-module", "huggingface", "diffusers")
    if plan.ignore_keys or (plan.key and not takes_key):
        raise UsageError(
            f"names are chosen in a state dict only, and the source is {identified.says}",
            where="--ignore-keys" if plan.ignore_keys else "--key",
        )


def _refuse_weights(plan: Plan) -> None:
    """Raise `UsageError` for --weights beside a source that is a file, and for --model beside one that is a name."""
    named = is_library_name(plan.source)
    if plan.weights is not None and not named:
        raise UsageError(
            f"--weights goes with a source timm:NAME or torchvision:NAME, got {plan.source}",
            where="--weights",
            hint="A file of weights is the source itself: infer optimize FILE --model timm:NAME",
        )
    if named and plan.model:
        raise UsageError(f"{plan.source} is a model already", where="--model", hint="Leave --model out")
