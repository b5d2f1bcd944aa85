"""optimize(): the one-way street from a source to a published artifact.

    source ─ load ─▶ model ─ shrink ─▶ smaller model ─ capture ─▶ graph ─ lower ─▶ runner ─ compare, time ─▶ artifact

The float reference travels beside it. Each step returns findings; a gate that fails raises and nothing is published.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from torch import nn

from . import artifact, capture, mixed, quant, sources
from .errors import NotUsableError
from .kernels import native
from .publishing import Outcome, publish
from .report import roofline
from .selection import choose, enforce, try_backends
from .spec import DTYPES, Finding, Plan
from .street import Street, Watch, resolve, resolve_plan_names
from .trial import FloatForms, Trial

__all__ = ["Outcome", "Street", "Watch", "float_graph", "load", "optimize", "resolve", "shrink"]


def optimize(plan: Plan, output: Path, *, watch: Watch | None = None, replace: bool = False) -> Outcome:
    """Take `plan.source` down the street and publish `output`. Raises an `InferError`, and then leaves nothing behind.

    `GateError`: less faithful than the limits of its precision class, or slower than the unquantized graph.
    """
    street = Street(resolve_plan_names(plan), watch or Watch())
    resolve(street)
    prepare_kernels(street)
    with artifact.stage(output, replace=replace) as folder:
        street.watch.step("load", plan.source)
        loaded = load(street)
        street.watch.step("capture", "the float original")
        original = float_graph(loaded, street.plan)
        if original.program is not None and street.plan.quant != "none":
            quant.fold_batch_norms(module_of(loaded), original.program)
        mix = layer_mix(street, loaded, original)
        mixed.decide(mix)
        small, best = build(street, loaded, original, mix, folder)
        street.found(roofline.probe(original, best.size, street.plan))
        return publish(street, loaded, small, best, mix, folder, output)


def prepare_kernels(street: Street) -> None:
    """Compile the native kernels where that was not done yet, so that nobody waits for it unknowing."""
    if street.plan.quant != "none" and street.plan.device == "cpu" and not native.built():
        street.step("prepare", "compiling the native kernels, once for this machine")
        native.why_not(street.progress)


def load(street: Street) -> sources.LoadedModel:
    loaded = sources.load(street.plan)
    street.found(loaded.findings)
    street.found([Finding("load", "kind", loaded.kind), Finding("load", "inputs from", loaded.samples_from)])
    if loaded.module is not None:
        street.found(sources.fill(loaded))
    return loaded


def float_graph(loaded: sources.LoadedModel, plan: Plan) -> capture.Graph:
    """The float original as a graph; nothing about it was changed."""
    if loaded.onnx is not None:
        outputs = tuple(loaded.meta.get("outputs", ()))
        return capture.Graph(
            loaded.inputs, outputs, loaded.samples, loaded.sizes, onnx=loaded.onnx, task=loaded.task
        )
    if loaded.load == "offload":
        module = module_of(loaded).eval()
        return capture.Graph(loaded.inputs, (), loaded.samples, loaded.sizes, module=module, task=loaded.task)
    return _captured(loaded, module_of(loaded))


def module_of(loaded: sources.LoadedModel) -> nn.Module:
    if loaded.module is None:
        raise NotUsableError("an ONNX source has no torch module", hint="Use --backend ort")
    return loaded.module


def _captured(loaded: sources.LoadedModel, module: nn.Module) -> capture.Graph:
    return capture.capture(
        module.eval(),
        loaded.inputs,
        loaded.samples,
        sizes=loaded.sizes,
        outputs=loaded.outputs,
        task=loaded.task,
    )


def layer_mix(street: Street, loaded: sources.LoadedModel, original: capture.Graph) -> mixed.Mix:
    """What formats are decided on: the float model, its calibration rows, a call of it."""
    in_memory = original.onnx is None and loaded.load != "offload"
    real = mixed.Real(
        loaded.module if in_memory else None,
        loaded.inputs,
        tuple(spec.name for spec in original.outputs),
        loaded.task,
        loaded.samples,
        loaded.calibration,
    )
    return mixed.Mix(street.plan, real, street)


def build(
    street: Street, loaded: sources.LoadedModel, original: capture.Graph, mix: mixed.Mix, folder: Path
) -> tuple[capture.Graph, Trial]:
    """Shrink, lower, compare and time; sensitive layers rise as long as the fidelity gate fails and they can."""
    floats = FloatForms(original, folder / "trials" / "float")
    while True:
        street.watch.step("shrink", street.plan.quant)
        small, module = shrink(street, loaded, original, mix)
        if original.module is not None:
            original = dataclasses.replace(original, outputs=small.outputs)
        capture.save(small, folder)
        trials = try_backends(street, original, small, folder, floats)
        best = choose(street, trials)
        stuck = mixed.rise(mix, best.fidelity) if best.unfaithful(street.plan) else ""
        if stuck is not None:
            enforce(street, best, loaded.module, module, small, stuck)
            return small, best
        for trial in trials:
            trial.close()
            shutil.rmtree(trial.folder.parent)
        shutil.rmtree(folder / "weights")  # mapped files are unlinked, never written over
        street.again()


def shrink(
    street: Street, loaded: sources.LoadedModel, original: capture.Graph, mix: mixed.Mix | None = None
) -> tuple[capture.Graph, nn.Module | None]:
    """A second copy of the model with its layers quantized and its dtype lowered, captured like the first."""
    plan = street.plan
    unchanged = plan.quant == "none" and plan.dtype in ("float32", "tf32")
    if original.onnx is not None or (unchanged and original.module is None):
        return original, loaded.module
    copy = sources.load(plan)
    if plan.quant != "none":
        mix = mix or layer_mix(street, loaded, original)
        module = module_of(copy)
        if original.program is not None:
            street.found(quant.fold_batch_norms(module_of(loaded), original.program, into=module))
        found = quant.quantize_model(
            module,
            plan,
            reader=copy.reader,
            renames=copy.renames,
            stats=mix.stats,
            progress=street.watch.progress,
            formats=quant.resolve_pins(plan.layers, quant.layer_names(module)) | mix.formats,
            shelf=mix.shelf,
        )
        street.found(found)
        mix.layers = mix.choices(module, found)
    sources.fill(copy, strategy="meta" if copy.load == "offload" else None)
    if plan.dtype in ("float16", "bfloat16"):
        copy.module = capture.in_dtype(module_of(copy), loaded.inputs, DTYPES[plan.dtype])
    return _captured(copy, module_of(copy)), copy.module
