"""Space of a search: the candidates of each stage, cheap and telling ones first."""

from __future__ import annotations

import itertools
from typing import Any

from msgspec.structs import replace

from .. import compress, plugins
from .. import device as hardware
from ..budgets import Budgets
from ..fidelity.thresholds import default_kv_dtype
from ..options.values import parse_backend_options, parse_calibration, parse_dtype, parse_kv_dtype
from ..plan import Plan
from ..report.search_record import Candidate

BACKENDS, FORMATS = "backends", "infer.compress.formats"
BITS = (6.0, 5.0)  # of mixed precision, where no budget of loss says how many


def backends(plan: Plan, budgets: Budgets) -> list[str]:
    """List the backends to try, cheap ones first: plain torch, which needs no lowering, then runtimes of graphs, then
    those that compile code; backends not usable here are left out.

    A backend that was named, by --backend or --space, stays in, so that its trial says why it can't run.
    """
    if plan.backend != "auto":
        return [plan.backend]
    if named := budgets.space.get("backend"):
        for name in named:
            plugins.get(BACKENDS, name)
        return sorted(named, key=lambda name: name != "eager")
    usable = [name for name in plugins.names(BACKENDS) if plugins.why_not(BACKENDS, name) is None]
    return sorted(usable, key=lambda name: (name != "eager", plugins.get(BACKENDS, name).EXECUTES_CODE))


def formats(plan: Plan, budgets: Budgets) -> list[str]:
    """List the formats to try, "none" for float among them: of each format file the variants that it declares."""
    if plan.quant != "none":
        return [plan.quant]
    if named := budgets.space.get("quant"):
        for name in named:
            if name != "none":
                compress.check_option(plugins.get(FORMATS, name.partition(":")[0]), plan.with_(quant=name))
        return list(named)
    found, kind = ["none"], hardware.resolve(plan.device).value.partition(":")[0]
    for name in plugins.names(FORMATS):
        format = plugins.get(FORMATS, name)
        if kind in getattr(format, "SEARCHED_ON", (kind,)):
            found += getattr(format, "SEARCHED", (name,))
    return found


def first_candidates(plan: Plan, budgets: Budgets) -> list[list[Candidate]]:
    """Return the stages: float on the backends that are cheap to lower for, each format on the first backend, then
    formats on the others and float on those that compile code, which a fast format may spare.

    Options that the user pinned are the same in all; values of --space for dtype, calibrate, kv-dtype and threads are
    tried with each.
    """
    names, asked = backends(plan, budgets), formats(plan, budgets)
    quantized = sorted(
        (name for name in asked if name != "none"),
        key=lambda name: compress.is_weight_only(plan.with_(quant=name)),
    )
    variants = _variants(plan, budgets)
    compiled = [name for name in names[1:] if plugins.get(BACKENDS, name).EXECUTES_CODE]
    cheap = [name for name in names if name not in compiled]
    floats, last = (
        [Candidate(backend=name, **extra) for name in chosen for extra in variants] if "none" in asked else []
        for chosen in (cheap, compiled)
    )
    stages, mixed = [floats], _mixed(plan, budgets)
    for chosen in (names[:1], names[1:]):
        made = [
            Candidate(backend=b, quant=q, **extra) for q in quantized for b in chosen for extra in variants
        ]
        made += [
            Candidate(backend=b, **kind, **extra) for kind in mixed for b in chosen for extra in variants
        ]
        stages.append(made)
    stages[-1] += last
    return [list(dict.fromkeys(stage)) for stage in stages]


def same_operators(candidate: Candidate, plan: Plan, budgets: Budgets) -> list[Candidate]:
    """Return the candidate on the backends whose layers call the operators of its own backend (`LAYERS_AS`)."""
    names = [name for name in backends(plan, budgets) if layers_as(name) == candidate.backend]
    return [replace(candidate, backend=name, options=()) for name in names if name != candidate.backend]


def dtype_gain() -> float:
    """Return how many times faster float layers get in another dtype at most: half the bytes, products of its units."""
    return 16.0 if "amx_int8" in hardware.isa() else 2.0


def layers_as(backend: str) -> str:
    """Return the backend whose operators the layers of a backend call: itself unless it declares another one."""
    return str(getattr(plugins.get(BACKENDS, backend), "LAYERS_AS", backend))


def _variants(plan: Plan, budgets: Budgets) -> list[dict[str, Any]]:
    """Return the products of the values that --space names for the fields besides backend and format."""
    lists: list[list[tuple[str, Any]]] = []
    for name, parse in (
        ("dtype", parse_dtype),
        ("calibrate", parse_calibration),
        ("kv_dtype", parse_kv_dtype),
    ):
        if values := budgets.space.get(name):
            lists.append([(name, parse(value)) for value in values])
    if values := budgets.space.get("threads"):
        lists.append([("threads", int(value)) for value in values])
    return [dict(product) for product in itertools.product(*lists)]


def _mixed(plan: Plan, budgets: Budgets) -> list[dict[str, Any]]:
    """Return the mixed precisions: those of --space, of --bits, or within --max-drop."""
    if plan.bits is not None:
        return [{"bits": plan.bits}]
    if values := budgets.space.get("bits"):
        return [{"bits": float(value)} for value in values]
    if plan.max_drop is not None and budgets.metric is None and "quant" not in budgets.space:
        return [{"drop": True}] if plan.quant == "none" else []
    return []


def refinements(best: Candidate, plan: Plan, budgets: Budgets, *, generates: bool) -> list[Candidate]:
    """Return variants of the best candidate so far: its KV cache in fewer bits, mixed precision, other options of its
    backend, and the float model on its backend in another dtype.
    """
    found: list[Candidate] = []
    free = [name for name in ("dtype", "kv_dtype") if name not in budgets.space]
    if generates and "kv_dtype" in free and plan.kv_dtype == "auto" and memory_matters(budgets):
        used = best.kv_dtype if best.kv_dtype != "auto" else default_kv_dtype(best.plan(plan))
        found += [replace(best, kv_dtype=kind) for kind in ("float16", "int8") if kind != used]
    searched = getattr(plugins.get(BACKENDS, best.backend), "searched_dtypes", None)
    if searched is not None and "dtype" in free and plan.dtype == "auto":
        float_form = replace(best, quant="none", bits=None, drop=False)
        found += [replace(float_form, dtype=kind) for kind in searched() if kind != "float32"]
    found += _with_options(best, plan, budgets)
    small = budgets.aim in ("size", "memory") or budgets.max_size is not None
    if small and not best.drop and best.bits is None and {"quant", "bits"}.isdisjoint(budgets.space):
        found += [replace(best, quant="none", bits=bits) for bits in BITS]
    return [one for one in dict.fromkeys(found) if one != best]


def _with_options(best: Candidate, plan: Plan, budgets: Budgets) -> list[Candidate]:
    """Return the best candidate with another value of one option that its backend declares: those that --space names,
    else those that may gain what is aimed at.
    """
    if plan.backend_options:
        return []
    backend = plugins.get(BACKENDS, best.backend)
    aims = {budgets.aim, *(["memory"] if memory_matters(budgets) else [])}
    now = parse_backend_options(best.options)
    found = []
    for name, option in plugins.declared_options(backend).items():
        usual = option.values if aims & set(option.searched_for) else ()
        values = budgets.space.get(f"{best.backend}.{name}", usual)
        for value in values:
            own = {**now, name: value}
            changed = tuple(f"{key}={own[key]}" for key in sorted(own) if own[key] != _default(backend, key))
            found.append(replace(best, options=changed))
    return found


def _default(backend: Any, option: str) -> str:
    return plugins.declared_options(backend)[option].values[0]


def check_options(budgets: Budgets) -> None:
    """Raise `UsageError` for an option in --space, BACKEND.NAME, that no backend declares, and for its values."""
    for key, values in budgets.space.items():
        name, dot, option = key.partition(".")
        for value in values if dot else ():
            plugins.check_options(name, plugins.get(BACKENDS, name), {option: value})


def memory_matters(budgets: Budgets) -> bool:
    """Return True where memory is a budget or the objective."""
    return bool(budgets.sequences or budgets.max_memory) or budgets.aim == "memory"


def eager_twin(candidate: Candidate, first: str) -> Candidate:
    """Return the candidate on the first backend, where its fidelity is measured."""
    return replace(candidate, backend=first, options=())
