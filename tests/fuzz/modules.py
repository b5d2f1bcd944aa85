"""Random modules through `optimize`; `python -m tests.fuzz.modules [NUMBER [FIRST_SEED [SECONDS]]]` prints a
table of the modules that were tried in that time.

Each ends as an artifact whose outputs are those of the float model, at batch sizes that nothing judged, or as a refusal
with a sentence that leaves nothing behind. Exit code 1, a traceback or a wrong number makes the run fail.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer import Plan, Predictor, library_errors
from infer.errors import InferError
from infer.fidelity.thresholds import limits
from infer.graph.program import flatten
from infer.library_errors import quiet
from infer.run import stages
from tests.support import generated_modules as generated

FORMS = ("pickle", "pickle", "pickle", "factory", "state", "exported", "onnx")
QUANTS = ("none", "none", "int8", "int8", "int8", "int8:weight", "int8:static", "nf4", "int4", "fp4", "cluster:4",
          "cluster:6", "cluster:3", "nf4:16")  # fmt: skip
SIZES = (1, 3, 8)
REFUSALS = (2, 3, 4, 5, 7)
SLACK = 2.0  # other rows than those that were judged, fewer at a time


@dataclass(frozen=True)
class Case:
    seed: int
    form: str
    backend: str
    quant: str
    allow_partial: bool


@dataclass
class CaseOutcome:
    """Outcome of a case: exit code 0 … 7, the message of a refusal, and the fault, if any."""

    code: int
    said: str = ""
    wrong: str = ""


def case(seed: int, inductor: float = 0.01) -> Case:
    """Derive a case from a seed."""
    draw = random.Random(seed * 7919 + 1)
    backend = "inductor" if draw.random() < inductor else draw.choice(("eager", "eager", "ort"))
    form = draw.choice(FORMS)
    if form == "pickle" and "weight_norm" in generated.recipe(seed).kinds:
        form = "state"  # parametrized modules can't be pickled
    backend = "ort" if form == "onnx" else backend
    quant = draw.choice(("none", "int8") if form == "onnx" else QUANTS)
    return Case(seed, form, backend, quant, draw.random() < 0.8)


def plan_of(case: Case, folder: Path) -> Plan:
    """Write the files of a case and return the plan that names them."""
    recipe, model = generated.recipe(case.seed), generated.build(case.seed)
    torch.save(generated.rows(recipe, 24, case.seed + 1), folder / "data.pt")
    factory = folder / "factory.py"
    factory.write_text(
        f"from tests.support.generated_modules import build as make\n\n\ndef build():\n    return make({case.seed})\n"
    )
    plan = Plan(
        source=str(folder / "model.pt"),
        backend=case.backend,
        quant=case.quant,
        inputs=generated.inputs(recipe),
        data=str(folder / "data.pt"),
        trust_code=True,
        allow_slower=True,
        allow_partial=case.allow_partial,
        batches=(),
    )
    if case.form == "factory":
        return plan.with_(source=f"{factory}:build")
    if case.form == "state":
        torch.save(model.state_dict(), folder / "model.pt")
        return plan.with_(model=f"{factory}:build")
    if case.form in ("exported", "onnx"):
        try:
            return plan.with_(source=exported(model.eval(), recipe, folder, case.form), inputs=())
        except Exception:  # noqa: BLE001 - torch can't export it: then its pickle has to be refused
            pass
    torch.save(model, folder / "model.pt")
    return plan


def exported(model: torch.nn.Module, recipe: generated.Recipe, folder: Path, form: str) -> str:
    """Export a model with a symbolic batch to .pt2 or .onnx."""
    values = generated.rows(recipe, 2, 0)
    shapes = {name: {0: torch.export.Dim("batch", min=1, max=64)} for name in values}
    path = folder / ("model.onnx" if form == "onnx" else "model.pt2")
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (), values, dynamic_shapes=shapes, strict=False)
        if form == "onnx":
            torch.onnx.export(
                program, (), str(path), kwargs=values, dynamo=True, external_data=False, verbose=False
            )
        else:
            torch.export.save(program, path)
    return str(path)


def run(case: Case, folder: Path) -> CaseOutcome:
    """Optimize one case in `folder`, which is empty, and judge what came of it."""
    plan, output = plan_of(case, folder), folder / "out.infer"
    before = set(folder.iterdir())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stages.optimize(plan, output)
    except InferError as error:
        return refused(error.exit_code, str(error), set(folder.iterdir()) - before)
    except Exception as error:  # noqa: BLE001 - exit code 1 is what is looked for
        if refusal := library_errors.as_resource_error(error):
            return refused(refusal.exit_code, str(refusal), set(folder.iterdir()) - before)
        return CaseOutcome(1, library_errors.describe(error), traceback.format_exc())
    try:
        return CaseOutcome(0, wrong=differs(case, plan, output))
    except Exception:  # noqa: BLE001 - an artifact that does not run is as wrong
        return CaseOutcome(0, wrong=traceback.format_exc())


def refused(code: int, said: str, left: set[Path]) -> CaseOutcome:
    wrong = ""
    if code not in REFUSALS:
        wrong = f"exit code {code}"
    elif left:
        wrong = f"left behind: {', '.join(path.name for path in left)}"
    elif len(said) < 20 or "Traceback" in said or INTERNAL.search(said):
        wrong = "no sentence"
    elif re.search(r"could not (lower|run) this model", said):
        wrong = "" if EXPECTED_FAILURES.search(said) else "a backend failed"
    return CaseOutcome(code, said, wrong)


# Words of Python and of libraries about themselves, which tell a user nothing; exceptions of the model itself do.
INTERNAL = re.compile(
    r"^(?!the float model itself fails).*"
    r"(has no attribute|is not subscriptable|treespec|\b(Assertion|Attribute|Index|Key|Type)Error)",
    re.DOTALL,
)
# Failures of a backend's own library that were looked at: operators that it does not have.
EXPECTED_FAILURES = re.compile(r"No ONNX function|NOT_IMPLEMENTED|not supported by ONNX|Unsupported")


@torch.no_grad()
def differs(case: Case, plan: Plan, output: Path) -> str:
    """Return why an artifact's outputs differ from the float model's, or an empty string."""
    recipe, model = generated.recipe(case.seed), generated.build(case.seed).float().eval()
    if recipe.oddity == "stateful" and case.form == "onnx":
        return ""  # torch's export has left the state out
    allowed = limits(plan.with_(dtype="float32"), "tensors")
    bound = float(allowed.relative_error or 0) * (SLACK if case.quant != "none" else 1)
    with Predictor.load(output, trust_code=True) as predictor:
        first = predictor.inputs[0].shape[0]
        for size in SIZES if isinstance(first, str) else [first]:
            rows = generated.rows(recipe, 9, case.seed + 99)
            error, norm = Counter[int](), Counter[int]()
            for start in range(0, 9 - size + 1, size):
                part = {name: value[start : start + size] for name, value in rows.items()}
                expected = flatten(model(**{name: value.clone() for name, value in part.items()}))
                # By position: torch's ONNX exporter renames an input that the model also returns.
                given = zip(predictor.inputs, part.values(), strict=True)
                got = list(predictor.predict({spec.name: value.numpy() for spec, value in given}).values())
                if reason := shapes_differ(expected, got):
                    return f"batch {size}: {reason}"
                for i, (e, g) in enumerate(zip(expected, map(torch.as_tensor, got), strict=True)):
                    error[i] += difference(e, g)
                    norm[i] += float(e.double().norm() ** 2)
            for i in norm:
                flexible = not expected[i].is_floating_point()  # classes flip where two are near
                if (error[i] > bound**2 * norm[i]) and not (flexible and case.quant != "none"):
                    relative = (error[i] / max(norm[i], 1e-30)) ** 0.5
                    return f"batch {size}, output {i}: relative error {relative:.4g}, allowed {bound:.4g}"
    return ""


def difference(expected: Tensor, got: Tensor) -> float:
    both = torch.isnan(expected.float()) & torch.isnan(got.float())
    return float((expected.double() - got.double()).masked_fill(both, 0).norm() ** 2)


def shapes_differ(expected: list[Tensor], got: list[Any]) -> str:
    one = [(tuple(e.shape), str(e.dtype).removeprefix("torch.")) for e in expected]
    other = [(tuple(g.shape), str(g.dtype)) for g in got]
    return "" if one == other else f"expected {one}, got {other}"


def table(endings: Mapping[Case, CaseOutcome]) -> str:
    """Count outcomes by block, form, backend and format."""
    lines: dict[str, Counter[str]] = {}
    for case, ending in endings.items():
        column = "wrong" if ending.wrong else str(ending.code)
        kinds = {
            *generated.recipe(case.seed).kinds,
            f"form {case.form}",
            f"backend {case.backend}",
            f"quant {case.quant}",
        }
        for kind in ("all", *kinds):
            lines.setdefault(kind, Counter())[column] += 1
    columns = ["0", "2", "3", "4", "5", "7", "wrong"]
    rows = [f"{kind:24}" + "".join(f"{count[c]:7}" for c in columns) for kind, count in sorted(lines.items())]
    return "\n".join([f"{'':24}" + "".join(f"{c:>7}" for c in columns), *rows])


def main() -> int:
    number, first, seconds = (int(a) for a in (sys.argv[1:] + ["300", "0", "36000"][len(sys.argv) - 1 :]))
    end = time.monotonic() + seconds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    endings: dict[Case, CaseOutcome] = {}
    reasons: Counter[str] = Counter()
    for seed in range(first, first + number):
        if time.monotonic() > end:
            break
        folder = Path(tempfile.mkdtemp(prefix="infer-fuzz-"))
        made = case(seed)
        ending = endings[made] = run(made, folder)
        shutil.rmtree(folder)
        if ending.wrong:
            print(
                f"WRONG {made} {generated.recipe(seed)}\n  {ending.said[:400]}\n  {ending.wrong[-1500:]}",
                flush=True,
            )
        elif ending.code:
            reasons[f"{ending.code} {re.sub(r'[0-9.]+', '#', ending.said)[:110]}"] += 1
            print(f"refused {ending.code} {made}: {ending.said[:300]}", file=sys.stderr, flush=True)
    print(table(endings))
    for reason, count in reasons.most_common(40):
        print(f"{count:5}  {reason}")
    return 1 if any(ending.wrong for ending in endings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
