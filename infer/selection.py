"""Every backend that may run a graph is tried on it; the fastest that passes its gates is taken, or a gate speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from . import capture, failures, fidelity, plugins
from .errors import GateError, InferError, NotUsableError, ResourceError
from .floats import FloatForms
from .generate.step import StepShape
from .plan import Plan
from .spec import Choice, Finding
from .street import Street
from .thresholds import coarser_cache
from .timing import time_trials
from .trial import Trial, run_trial


@dataclass
class Shrunk:
    """What is lowered. Of a language model that can generate `graph` is its step, of that `shape`; `windows` captures
    the whole-window form, for backends that have no paged attention."""

    graph: capture.Graph
    module: nn.Module | None
    shape: StepShape | None = None
    windows: Callable[[], capture.Graph] | None = None


def try_backends(
    street: Street, original: capture.Graph, shrunk: Shrunk, folder: Path, floats: FloatForms
) -> list[Trial]:
    trials: list[Trial] = []
    errors: list[str] = []
    full: ResourceError | None = None
    work = folder / "trials"
    for name in candidates(street.plan, steps=shrunk.shape is not None):
        if trials and name == "eager":
            continue
        backend, small, shape, place = plugins.get("backends", name), shrunk.graph, shrunk.shape, folder
        why = street.scores_only
        if shape is not None and not backend.STEPS and shrunk.windows is not None:
            why = f"{name} has no attention over a paged KV cache"
            street.found([Finding("lower", "generation", False, why=why)])
            small, shape, place = shrunk.windows(), None, work / f"windows-{name}"
            place.mkdir(parents=True)
            capture.save(small, place)
        reason = plugins.why_not("backends", name) or backend.refuses(small, street.plan)
        if reason:
            street.found([Finding("lower", f"refused {name}", None, why=reason)])
            errors.append(f"{name}: {reason}")
            continue
        at = _Steps(street)
        at.step("lower", name)
        plan = street.plan.with_(backend=name)
        try:
            trial = run_trial(plan, original, small, place, work / name, at.step, floats, shape)
            trial.scores_only = why
            trials.append(trial)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is its backend's refusal
            refusal = _refused(street, name, at.name, error, _others(name, small, plan))
            full = refusal if isinstance(refusal, ResourceError) else full
            errors.append(f"{name}: {refusal}")

    def failed(trial: Trial, error: Exception) -> None:
        trials.remove(trial)
        errors.append(f"{trial.backend}: {_refused(street, trial.backend, 'time', error, [])}")

    street.found(time_trials(street.plan, original, trials, floats, street.watch.step, failed))
    if not trials and full is not None:
        raise full
    if not trials:
        raise NotUsableError(f"no backend can run this model: {'; '.join(errors)}", hint="Run 'infer doctor'")
    return trials


def _refused(street: Street, name: str, stage: str, error: Exception, others: list[str]) -> InferError:
    """A refusal that is noted where other backends may still do; raised where this one was asked for."""
    refusal = failures.of_backend(name, stage, error, others)
    if street.plan.backend != "auto" or not isinstance(refusal, NotUsableError | ResourceError):
        raise refusal from (None if refusal is error else error)
    street.found([Finding("lower", f"refused {name}", None, why=str(refusal))])
    return refusal


@dataclass
class _Steps:
    """Which step of a trial was begun last."""

    street: Street
    name: str = ""

    def step(self, name: str, detail: str) -> None:
        self.name = name
        self.street.watch.step(name, detail)


def _others(name: str, graph: capture.Graph, plan: Plan) -> list[str]:
    """The backends that may take what this one failed with."""
    return [
        other
        for other in sorted(plugins.names("backends"), key=lambda one: one != "ort")
        if other != name
        and plugins.why_not("backends", other) is None
        and plugins.get("backends", other).refuses(graph, plan.with_(backend=other)) is None
    ]


def candidates(plan: Plan, *, steps: bool = False) -> list[str]:
    """The backend that was asked for; of "auto" all of them, plain torch only when no other one can.

    Of a language model (`steps`) "auto" means those that can generate.
    """
    if plan.backend != "auto":
        return [plan.backend]
    names = [n for n in plugins.names("backends") if not steps or plugins.get("backends", n).STEPS]
    return sorted(names, key=lambda name: name == "eager")


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
        milder = "Choose a milder --quant"
        if coarser_cache(street.plan) and best.shape is not None:
            worst += f"; the KV cache is {street.plan.kv_dtype}, coarser than the weights"
            milder = "Keep keys and values exact with --kv-dtype fp32"
        raise GateError(
            f"refused, not faithful enough: {reason}{worst}",
            hint=f"Nothing was published. {milder}, or allow more with --max-error",
        )
    if best.slower and not street.plan.allow_slower:
        raise GateError(
            f"refused, slower: {best.verdict}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )
