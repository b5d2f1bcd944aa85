"""optimize(): the one-way street from a source to a published artifact.

    source ─ load ─▶ model ─ shrink ─▶ smaller model ─ capture ─▶ graph ─ lower ─▶ runner ─ compare, time ─▶ artifact

The float reference travels beside it. Each step returns findings; a gate that fails raises and nothing is published.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from torch import nn

from .. import compress, llm, plugins
from .. import load as sources
from ..artifact import store
from ..compress import assign
from ..errors import NotUsableError, UsageError
from ..graph import capture
from ..kernels import cpu
from ..llm.step.schedule_consistency import require_float_step
from ..llm.text import chat_template
from ..load.hf_wrappers import Decoder
from ..plan import Plan
from ..report import roofline
from ..spec import DTYPES, Finding
from .float_reference import FloatForms
from .llm_mode import find_step, no_step, refuse_backend
from .publish import Outcome, publish
from .run import Street, Watch, resolve, resolve_plan_names
from .select import Shrunk, choose, enforce, try_backends
from .trial import Trial

__all__ = ["Outcome", "Street", "Watch", "float_graph", "float_step", "load", "optimize", "resolve", "shrink"]


def optimize(plan: Plan, output: Path, *, watch: Watch | None = None, replace: bool = False) -> Outcome:
    """Optimize the model of `plan.source`, check it against the original and publish the artifact `output`.

    `watch` is told of progress and findings; `replace` overwrites an artifact. Nothing is published when this raises:

    - `UsageError`: an option is wrong, or options exclude each other.
    - `SourceError`, `UnsafeSourceError`: the model file is damaged, or holds code and `plan.trust_code` is not set.
    - `GateError`: less faithful than the limits of the precision class, or slower than the fastest float form.
    - `NotUsableError`: this machine or this model can't run with the backend, format or device asked for.
    - `BusyError`: the output exists, or another process writes it.
    - `ResourceError`: out of memory or disk.
    """
    street = Street(resolve_plan_names(plan), watch or Watch())
    resolve(street)
    refuse_backend(street.plan)
    prepare_kernels(street)
    with store.stage(output, replace=replace) as folder:
        street.watch.step("load", plan.source)
        loaded = load(street)
        find_step(street, loaded)
        street.watch.step("capture", "the float original")
        original = float_graph(loaded, street.plan)
        if original.program is not None and street.plan.quant != "none":
            compress.fold_batch_norms(module_of(loaded), original.program)
            compress.fold_weight_norms(module_of(loaded))
            split_recurrent(loaded)
        mix = layer_mix(street, loaded, original)
        assign.decide(mix)
        original, best = build(street, loaded, original, mix, folder)
        ceiling = roofline.probe(original, best.reads, street.plan, shape=best.shape)
        street.found([*ceiling.findings(), *(step.finding() for step in best.steps)])
        return publish(street, loaded, original, best, mix, ceiling, folder, output)


def prepare_kernels(street: Street) -> None:
    """Compile the native kernels where that was not done yet, so that nobody waits for it unknowing."""
    if street.plan.quant != "none" and street.plan.device == "cpu" and not cpu.built():
        street.step("prepare", "compiling the native kernels, once for this machine")
        cpu.why_not(street.progress)


def load(street: Street) -> sources.LoadedModel:
    loaded = sources.load(street.plan)
    if loaded.task == "text-generation":
        loaded.files, found = chat_template.carry(street.plan.chat_template, loaded.files)
        street.found(found)
    else:
        _without_cache(street, loaded.task)
    street.found(loaded.findings)
    street.found([Finding("load", "kind", loaded.kind), Finding("load", "inputs from", loaded.samples_from)])
    if loaded.module is not None:
        street.found(sources.fill(loaded))
    return loaded


def _without_cache(street: Street, task: str) -> None:
    """Only language models have a KV cache; what was asked of one is refused, what "auto" became forgotten."""
    asked = street.plan.kv_dtype != "auto" and "kv_dtype" not in {c.what for c in street.choices}
    if asked or street.plan.chat_template is not None:
        raise UsageError(
            f"--kv-dtype and --chat-template are for language models, the task of this one is {task}"
        )
    street.choices = [c for c in street.choices if c.what != "kv_dtype"]
    street.plan = street.plan.with_(kv_dtype="auto")


def split_recurrent(loaded: sources.LoadedModel) -> None:
    """Make the weight matrices of recurrent layers quantizable, under names of their own."""
    held = loaded.renames
    split = compress.split_recurrent(module_of(loaded))
    loaded.renames = {**held, **{new: held.get(old, old) for new, old in split.items()}}


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


def layer_mix(street: Street, loaded: sources.LoadedModel, original: capture.Graph) -> assign.Mix:
    """What formats are decided on: the float model, its calibration rows, a call of it."""
    in_memory = original.onnx is None and loaded.load != "offload"
    decoder = loaded.module.model if in_memory and isinstance(loaded.module, Decoder) else None
    real = assign.Real(
        loaded.module if in_memory else None,
        loaded.inputs,
        tuple(spec.name for spec in original.outputs),
        loaded.task,
        loaded.samples,
        loaded.calibration,
        steps=decoder is not None and _runs_as_step(street),
        head=None if decoder is None else decoder.get_output_embeddings(),  # type: ignore[operator]
    )
    return assign.Mix(street.plan, real, street)


def _runs_as_step(street: Street) -> bool:
    """True for a decoder that will be lowered as a step; else whole windows of tokens are what runs."""
    name = street.plan.backend
    return street.step_shape is not None and (name == "auto" or plugins.get("backends", name).STEPS)


def build(
    street: Street, loaded: sources.LoadedModel, original: capture.Graph, mix: assign.Mix, folder: Path
) -> tuple[capture.Graph, Trial]:
    """Shrink, lower, compare and time; sensitive layers rise as long as the fidelity gate fails and they can.

    Returns the float original, its outputs named, and the trial that was chosen.
    """
    kept: list[Shrunk] = []
    module = loaded.module if original.program is not None else None
    floats = FloatForms(original, folder / "trials" / "float", lambda: float_step(loaded, kept[-1]), module)
    while True:
        street.watch.step("shrink", street.plan.quant)
        shrunk = shrink(street, loaded, original, mix)
        if shrunk.shape is not None:
            if not kept:
                judge_float_step(street, loaded, shrunk.shape, original)
            kept.append(shrunk)
        if original.module is not None:
            outputs = shrunk.graph.outputs if shrunk.shape is None else llm.window_outputs(shrunk.shape)
            original = dataclasses.replace(original, outputs=outputs)
        capture.save(shrunk.graph, folder)
        trials = try_backends(street, original, shrunk, folder, floats)
        best = choose(street, trials)
        stuck = assign.rise(mix, best.fidelity) if best.unfaithful(street.plan) else ""
        if stuck is not None:
            enforce(street, best, loaded.module, shrunk.module, original, stuck)
            return original, best
        for trial in trials:
            trial.close()
            shutil.rmtree(trial.folder.parent)
        shutil.rmtree(folder / "weights")  # mapped files are unlinked, never written over
        street.again()


def judge_float_step(
    street: Street, loaded: sources.LoadedModel, shape: llm.StepShape, original: capture.Graph
) -> None:
    """Refuse a language model that answers otherwise when its tokens come in several steps, before it is lowered."""
    if original.module is not None:
        why = "its weights are streamed: only the lowered form is judged"
        street.found([Finding("capture", "float step", None, why=why)])
        return
    street.watch.step("compare", "the float model in steps")
    model = module_of(loaded).model
    street.found(require_float_step(model, shape, original.samples["input_ids"]))  # type: ignore[arg-type]


def float_step(loaded: sources.LoadedModel, shrunk: Shrunk) -> capture.Graph:
    """The float original as a step like `shrunk`; the same where nothing was changed."""
    if shrunk.module is loaded.module or shrunk.shape is None:
        return shrunk.graph
    return llm.capture_step(module_of(loaded).model, shrunk.shape)  # type: ignore[arg-type]


def shrink(
    street: Street, loaded: sources.LoadedModel, original: capture.Graph, mix: assign.Mix | None = None
) -> Shrunk:
    """A second copy of the model with its layers quantized and its dtype lowered, captured like the first; a language
    model as a step."""
    plan = street.plan
    unchanged = plan.quant == "none" and plan.dtype in ("float32", "tf32")
    if original.onnx is not None or (unchanged and original.module is None):
        return _form(street, loaded, original)
    copy = sources.load(plan)
    if plan.quant != "none":
        mix = mix or layer_mix(street, loaded, original)
        module = module_of(copy)
        if original.program is not None:
            street.found(compress.fold_batch_norms(module_of(loaded), original.program, into=module))
            street.found(compress.fold_weight_norms(module_of(loaded), into=module))
        split_recurrent(copy)
        pins = compress.resolve_pins(plan.layers, compress.layer_names(module))
        done = compress.quantize_model(
            module,
            plan,
            reader=copy.reader,
            renames=copy.renames,
            stats=mix.stats,
            progress=street.watch.progress,
            formats=pins | mix.formats,
            shelf=mix.shelf,
        )
        street.found(done.findings())
        mix.layers = mix.choices(module, done)
        covered = compress.cover(module, mix.reasons(done), mix.asked_float(pins))
        street.found(covered.findings())
        compress.enforce(covered, plan)
        mix.quantized = covered.verdict()
    sources.fill(copy, strategy="meta" if copy.load == "offload" else None)
    return _form(street, copy)


def _form(street: Street, loaded: sources.LoadedModel, captured: capture.Graph | None = None) -> Shrunk:
    """The graph of a model in the plan's dtype: the step of a language model where it can be one, else `captured`."""
    plan, module = street.plan, loaded.module
    low = DTYPES[plan.dtype] if plan.dtype in ("float16", "bfloat16") and captured is None else None

    def whole() -> capture.Graph:
        if captured is not None and captured.program is not None:
            return captured
        return _captured(
            loaded, capture.in_dtype(module_of(loaded), loaded.inputs, low) if low else module_of(loaded)
        )

    if captured is not None and captured.onnx is not None:
        return Shrunk(captured, module)
    if street.step_shape is not None and isinstance(module, Decoder):
        try:
            graph = llm.capture_step(module.model.to(low) if low else module.model, street.step_shape)
        except NotUsableError as error:
            no_step(street, str(error))
        else:
            return Shrunk(graph, module, street.step_shape, whole)
    return Shrunk(whole(), module)
