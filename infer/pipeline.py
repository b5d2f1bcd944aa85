"""optimize(): the one-way street from a source to a published artifact.

    source ─ load ─▶ model ─ shrink ─▶ smaller model ─ capture ─▶ graph ─ lower ─▶ runner ─ compare, time ─▶ artifact

The float reference travels beside it. Each step returns findings; a gate that fails raises and nothing is published.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from . import __version__, artifact, capture, fidelity, mixed, plugins, quant, sources
from . import device as hardware
from .errors import GateError, NotUsableError, UsageError
from .kernels import native
from .report import document, html, memory, roofline
from .spec import DTYPES, Choice, Finding, Plan
from .trial import FloatForms, Trial, run_trial


class Watch:
    """What a person sees while it runs; the command line overrides it, the Python API stays silent."""

    def step(self, name: str, detail: str = "") -> None: ...

    def progress(self, done: int, total: int, what: str) -> None: ...

    def found(self, finding: Finding) -> None: ...


@dataclass
class Outcome:
    """What `optimize` leaves: the artifact's path, its manifest and the report."""

    path: Path
    manifest: artifact.Manifest
    report: document.Report


@dataclass
class Street:
    """The state of one run: everything found so far, in order."""

    plan: Plan
    watch: Watch
    asked: str = "auto"  # the backend
    choices: list[Choice] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def found(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.watch.found(finding)

    def step(self, name: str, detail: str = "") -> None:
        self.watch.step(name, detail)

    def progress(self, done: int, total: int, what: str) -> None:
        self.watch.progress(done, total, what)

    def again(self) -> None:
        """What a round found that another one will find anew."""
        self.findings = [f for f in self.findings if f.stage not in ("shrink", "lower", "compare")]
        self.choices = [c for c in self.choices if c.what != "backend"]


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
        mix = layer_mix(street, loaded, original)
        mixed.decide(mix)
        small, best = build(street, loaded, original, mix, folder)
        street.found(roofline.probe(original, best.size, street.plan))
        return _publish(street, loaded, small, best, mix, folder, output)


def resolve_plan_names(plan: Plan) -> Plan:
    """Unknown names, and options that exclude each other, fail before anything is loaded."""
    if plan.bits is not None and plan.max_drop is not None:
        raise UsageError("--bits and --max-drop are two budgets for one decision", hint="Give one of them")
    if plan.layers and plan.quant == "none" and plan.bits is None and plan.max_drop is None:
        raise UsageError("--layer says what differs from --quant", hint="Give --quant as well")
    quant.check_pins(plan.layers, plan)
    if plan.backend != "auto":
        plugins.get("backends", plan.backend)
    if plan.quant != "none":
        quant.check_option(plugins.get("infer.quant", plan.quant_name), plan)
    return plan


def resolve(street: Street) -> None:
    """Turn every "auto" into a value and a reason, once."""
    plan = street.plan
    device = hardware.resolve(plan.device)
    street.choices.append(device)
    if plan.dtype == "auto":
        dtype = "float32" if device.value == "cpu" else "bfloat16"
        why = "CPUs without half-precision units are slower in it" if dtype == "float32" else "tensor cores"
        street.choices.append(Choice("dtype", "auto", dtype, why))
    else:
        dtype = plan.dtype
    hardware.use_tf32(dtype, device.value)
    street.plan = plan = plan.with_(device=device.value, dtype=dtype)
    street.asked = plan.backend
    if plan.quant == "none" and (plan.bits is not None or plan.max_drop is not None):
        least = mixed.smallest(plan.bits)
        street.choices.append(Choice("quant", "none", least, "the smallest format that the budget may use"))
        street.plan = plan = plan.with_(quant=least)
    if plan.backend == "trt" and plan.quant == "int8":
        why = "TensorRT computes int8 only with calibrated scales"
        street.choices.append(Choice("quant", "int8", "int8:static", why))
        street.plan = plan = plan.with_(quant="int8:static")
    if plan.backend != "auto" and (reason := plugins.why_not("backends", plan.backend)):
        other = "inductor" if plan.backend != "inductor" else "eager"
        raise NotUsableError(
            f"backend {plan.backend} is not usable on this machine: {reason}",
            hint=f"Use --backend {other}, or run 'infer doctor'",
        )
    if plan.threads:
        torch.set_num_threads(plan.threads)


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
        trials = _try_backends(street, original, small, folder, floats)
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


def _try_backends(
    street: Street, original: capture.Graph, small: capture.Graph, folder: Path, floats: FloatForms
) -> list[Trial]:
    trials: list[Trial] = []
    errors: list[str] = []
    work = folder / "trials"
    for name in candidates(street.plan):
        if trials and name == "eager":
            continue
        reason = plugins.why_not("backends", name) or plugins.get("backends", name).refuses(
            small, street.plan
        )
        if reason:
            street.found([Finding("lower", f"refused {name}", None, why=reason)])
            errors.append(f"{name}: {reason}")
            continue
        street.watch.step("lower", name)
        plan = street.plan.with_(backend=name)
        try:
            trials.append(run_trial(plan, original, small, folder, work / name, street.watch.step, floats))
        except NotUsableError as error:
            if street.plan.backend != "auto":
                raise
            street.found([Finding("lower", f"refused {name}", None, why=str(error))])
            errors.append(f"{name}: {error}")
    if not trials:
        raise NotUsableError(f"no backend can run this model: {'; '.join(errors)}", hint="Run 'infer doctor'")
    return trials


def candidates(plan: Plan) -> list[str]:
    """The backend that was asked for; of "auto" all of them, plain torch only when no other one can."""
    if plan.backend != "auto":
        return [plan.backend]
    return sorted(plugins.names("backends"), key=lambda name: name == "eager")


def choose(street: Street, trials: list[Trial]) -> Trial:
    """The fastest trial that passes its gates; when none passes, the fastest of all (its gate then speaks)."""
    passing = [t for t in trials if t.failure(street.plan) is None]
    ranked = sorted(passing or trials, key=lambda t: t.seconds)
    best = ranked[0]
    others = ", ".join(f"{t.backend} {t.seconds / best.seconds:.2f}x" for t in ranked[1:])
    why = f"the fastest here; time of the others: {others}" if others else "the only one that was tried"
    asked = street.asked
    street.choices.append(Choice("backend", asked, best.backend, why if asked == "auto" else "asked for"))
    for trial in trials:
        street.found([Finding("lower", f"tried {trial.backend}", trial.seconds, "s", trial.verdict)])
    street.plan = street.plan.with_(backend=best.backend)
    street.found(best.findings)
    return best


def enforce(
    street: Street,
    best: Trial,
    original: nn.Module | None,
    module: nn.Module | None,
    graph: capture.Graph,
    stuck: str = "",
) -> None:
    """The two gates. The fidelity gate names the worst layers, and why none rises; both say the way out."""
    reason = best.unfaithful(street.plan)
    if reason:
        worst = ""
        if original is not None and module is not None and street.plan.quant != "none":
            rows = {name: value[:4] for name, value in graph.samples.items()}
            layers = fidelity.worst_layers(original, module, rows)
            worst = "; worst layers: " + ", ".join(f"{f.what} {f.value:.3f}" for f in layers)
        worst += f"; {stuck}" if stuck else ""
        raise GateError(
            f"refused, not faithful enough: {reason}{worst}",
            hint="Nothing was published. Choose a milder --quant, or allow more with --max-error",
        )
    if best.slower and not street.plan.allow_slower:
        raise GateError(
            f"refused, slower: {best.verdict}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )


def _publish(
    street: Street,
    loaded: sources.LoadedModel,
    small: capture.Graph,
    best: Trial,
    mix: mixed.Mix,
    folder: Path,
    output: Path,
) -> Outcome:
    street.watch.step("publish", str(output))
    shutil.move(best.folder / "compiled", folder / "compiled") if (
        best.folder / "compiled"
    ).exists() else None
    (folder / "golden").mkdir()
    for name, tensors in best.golden.items():
        save_file(tensors, folder / "golden" / f"{name}.safetensors")
    for name, path in loaded.files.items():
        shutil.copyfile(path, folder / name)
    best.close()
    shutil.rmtree(folder / "trials", ignore_errors=True)
    if plugins.get("backends", best.backend).PORTABLE:
        shutil.rmtree(folder / "weights", ignore_errors=True)
        (folder / capture.PROGRAM).unlink(missing_ok=True)
    street.found(memory.probe(best.backend, folder, street.plan.device))
    manifest = _manifest(street, loaded, small, best, mix, output)
    report = document.from_manifest(
        manifest, latency=best.latency, size=artifact.size(folder), baseline=best.baseline
    )
    (folder / "report.json").write_bytes(document.encode(report))
    (folder / "report.html").write_text(html.render_html(report))
    return Outcome(output, artifact.publish(folder, output, manifest), report)


def _manifest(
    street: Street,
    loaded: sources.LoadedModel,
    small: capture.Graph,
    best: Trial,
    mix: mixed.Mix,
    output: Path,
) -> artifact.Manifest:
    """The plan in it pins the format of every layer, so that it makes the same artifact again."""
    pins = {layer.name: layer.format for layer in mix.layers}
    backend = plugins.get("backends", best.backend)
    return artifact.Manifest(
        name=output.name.removesuffix(".infer"),
        made_with=f"infer {__version__}",
        plan=street.plan.with_(layers=pins),
        choices=tuple(street.choices),
        backend=best.backend,
        device=street.plan.device,
        task=small.task,
        inputs=small.inputs,
        outputs=small.outputs,
        sizes=dict(small.sizes),
        target=backend.target(street.plan.device),
        versions=hardware.versions(),
        meta=dict(loaded.meta),
        verdict=tuple(best.verdicts(street.plan)),
        findings=tuple(street.findings),
        layers=mix.layers,
    )
