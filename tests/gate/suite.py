"""Planted faults and their clean twins through `optimize`, judged by whether they are refused.

`python -m tests.gate.suite [WORD …]` runs all, or those whose label holds every word, prints a table by kind, the names
of what escaped, and ends with 1 unless every fault was refused and every clean twin passed.
"""

from __future__ import annotations

import copy
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from infer import InferError, Plan, Predictor, optimize
from tests.gate import faults, graph_faults, measure, planted, step_faults
from tests.gate.planted import Plant, Tensors
from tests.gate.subjects import MAX_BATCH, MAX_LENGTH, SUBJECTS, Subject, answers
from tests.support import tiny_decoders
from tests.support.llm_artifacts import bytes_as_tokens

REFUSED, ESCAPED, CRASHED, NO_FAULT = "refused", "escaped", "crashed", "no fault"
PASSED, CLEAN_REFUSED = "clean passed", "clean refused"


@dataclass
class Ending:
    """How one run ended; `said` is the refusal, or what is wrong with the run."""

    label: str
    kind: str
    result: str
    said: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.result in (REFUSED, PASSED)


class Suite:
    """A folder with the sources of all subjects; runs one fault after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sources: dict[str, Path] = {}
        planted.install(folder / "site")

    def plan(self, subject: Subject, quant: str) -> Plan:
        """Write the files of a subject once and return the plan that names them."""
        if subject.name not in self._sources:
            path = self.folder / f"{subject.name}_model.py"
            path.write_text(
                "from tests.gate.subjects import SUBJECTS\n\n"
                f"SUBJECT = SUBJECTS[{subject.name!r}]\nINPUTS = dict(SUBJECT.inputs)\n"
                f"OUTPUTS, TASK = SUBJECT.outputs, SUBJECT.task\n\n\ndef build():\n    return SUBJECT.build()\n"
            )
            torch.save(subject.rows(), self.folder / f"{subject.name}.pt")
            self._sources[subject.name] = path
        return Plan(
            source=f"{self._sources[subject.name]}:build",
            backend="planted",
            quant=quant,
            data=str(self.folder / f"{subject.name}.pt"),
            allow_slower=True,
            allow_partial=True,
            batches=(),
            max_batch=MAX_BATCH,
            max_length=MAX_LENGTH,
        )

    def clean(self, subject: Subject, quant: str, change: faults.Fault | None = None) -> Ending:
        """Optimize without a fault, or with a harmless difference: published, and right by our own measure."""
        label = f"{subject.name}/{quant}/{change.name if change else 'clean'}"
        plant = Plant(subject, change.change) if change else Plant()
        ending = self._run(label, change.kind if change else "clean", self.plan(subject, quant), plant)
        if ending.result != ESCAPED:
            ending.result = CLEAN_REFUSED if ending.result == REFUSED else ending.result
            return ending
        ending.result = PASSED
        if change is None and (reason := self._wrong(subject, quant)):
            ending.result, ending.said = CLEAN_REFUSED, reason
        return ending

    def fault(self, one: faults.Fault, subject: Subject, quant: str) -> Ending:
        """Optimize with a fault: it has to be one by our own measure, and refused."""
        label = f"{subject.name}/{quant}/{one.name}"
        size, where = declared_size(one, subject, quant)
        if size < measure.FAULT:
            why = f"only {size:.2f} times what is allowed ({where})"
            return Ending(label, one.kind, NO_FAULT, why)
        ending = self._run(label, one.kind, self.plan(subject, quant), Plant(subject, one.change))
        if ending.result == ESCAPED:
            ending.said = f"{one.why} {size:.3g} times what is allowed ({where})"
        return ending

    def _run(self, label: str, kind: str, plan: Plan, plant: Plant) -> Ending:
        start = time.monotonic()
        result, said = ESCAPED, ""
        with planted.planting(plant), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                optimize(plan, self.folder / "out.infer", replace=True)
            except InferError as error:
                result, said = REFUSED, str(error)
                if error.exit_code == 1:
                    result = CRASHED
            except Exception:  # noqa: BLE001 - a traceback is no refusal
                result, said = CRASHED, traceback.format_exc()[-1500:]
        if result == REFUSED and (plant.change or plant.step or plant.edit) and not plant.calls:
            result, said = CRASHED, f"refused before the engine ran: {said}"
        return Ending(label, kind, result, said, time.monotonic() - start)

    def _wrong(self, subject: Subject, quant: str) -> str:
        """Return what is wrong with a published artifact by our own measure, or ""."""
        calls = list(calls_of(subject))
        module = subject.build()
        want = [answers(subject, module, inputs) for inputs in calls]
        with Predictor.load(self.folder / "out.infer", trust_code=True) as predictor:
            got = [_tensors(predictor.predict(inputs)) for inputs in calls]
        size, where = measure.times_allowed(want, got, quant, subject.task)
        return f"published with {size:.2f} times what is allowed ({where})" if size > measure.FAULT else ""


    def graph(self, subject: graph_faults.GraphSubject, name: str = "", edit: Any = None) -> Ending:
        """Optimize an ONNX graph of which the engine is given an edited one, or as it is."""
        path = self.folder / f"{subject.name.replace(' ', '_')}.onnx"
        onnx.save(subject.model, str(path))
        np.savez(path.with_suffix(".npz"), x=subject.rows)
        plan = Plan(source=str(path), backend="planted_ort", data=str(path.with_suffix(".npz")), allow_slower=True,
                    batches=(), max_batch=MAX_BATCH)  # fmt: skip
        label = f"{subject.name}/none/{name or 'clean'}"
        want = [{"y": torch.from_numpy(graph_faults.answer(subject.model, subject.rows))}]
        if edit is None:
            ending = self._run(label, "clean", plan, Plant())
            if ending.result == ESCAPED:
                with Predictor.load(self.folder / "out.infer") as predictor:
                    got = [_tensors(predictor.predict({"x": subject.rows}))]
                size, where = measure.times_allowed(want, got, "none", "tensors")
                ending.result = PASSED if size <= measure.FAULT else CLEAN_REFUSED
                ending.said = "" if size <= measure.FAULT else f"{size:.2f} times what is allowed ({where})"
            elif ending.result == REFUSED:
                ending.result = CLEAN_REFUSED
            return ending
        kind, why = next((kind, why) for kind, known, why, _ in subject.edits if known == name)
        wrong = copy.deepcopy(subject.model)
        edit(wrong)
        got = [{"y": torch.from_numpy(graph_faults.answer(wrong, subject.rows))}]
        size, where = measure.times_allowed(want, got, "none", "tensors")
        if size < measure.FAULT:
            return Ending(label, kind, NO_FAULT, f"only {size:.2f} times what is allowed ({where})")
        ending = self._run(label, kind, plan, Plant(edit=edit))
        if ending.result == ESCAPED:
            ending.said = f"{why} {size:.3g} times what is allowed ({where})"
        return ending

    def step(self, quant: str, one: step_faults.StepFault | None = None) -> Ending:
        """Optimize a language model of which one step is wrong, or none."""
        source = self.folder / "decoder"
        if not source.exists():
            tiny_decoders.build("llama").save_pretrained(source)
            bytes_as_tokens(source)
            torch.manual_seed(0)
            torch.save({"input_ids": torch.randint(3, 259, (8, 64))}, self.folder / "decoder.pt")
        plan = Plan(source=str(source), backend="planted", quant=quant, data=str(self.folder / "decoder.pt"),
                    kv_dtype="float32", allow_slower=True, allow_partial=True, batches=())  # fmt: skip
        label = f"decoder/{quant}/{one.name if one else 'clean'}"
        if one is None:
            ending = self._run(label, "clean", plan, Plant())
            ending.result = {ESCAPED: PASSED, REFUSED: CLEAN_REFUSED}.get(ending.result, ending.result)
            return ending
        ending = self._run(label, one.kind, plan, Plant(step=one.change))
        ending.said = one.why if ending.result == ESCAPED else ending.said
        return ending


def calls_of(subject: Subject) -> Iterator[Tensors]:
    """Yield calls as a user makes them: held-out rows by eights, few rows, the largest batch, other lengths."""
    rows = {name: value[::2] for name, value in subject.rows().items()}
    count = len(next(iter(rows.values())))
    for size in (8, 1, 2, 3):
        for start in range(0, count if size in (8, 1) else 12, size):
            yield {name: value[start : start + size] for name, value in rows.items()}
    yield {name: value[:MAX_BATCH] for name, value in rows.items()}
    for length in subject.lengths:
        yield subject.of_length(length)


@torch.no_grad()
def declared_size(one: faults.Fault, subject: Subject, quant: str) -> tuple[float, str]:
    """Return how many times what is allowed a fault is off, against the float module without the pipeline."""
    module, memory = subject.build(), dict[str, Any]()

    def right(inputs: Mapping[str, Tensor]) -> Tensors:
        return answers(subject, module, inputs)

    calls = list(calls_of(subject))
    got = [planted.faulty(one.change, subject, right, inputs, memory) for inputs in calls]
    return measure.times_allowed([right(inputs) for inputs in calls], got, quant, subject.task)


def _tensors(values: Mapping[str, Any]) -> Tensors:
    return {name: torch.as_tensor(value) for name, value in values.items()}


def spare_time() -> None:
    """Skip what takes longer than the rest and judges nothing: the process that measures memory, threads that wait for
    each other, and the garbage collector's way through all that was imported.
    """
    from infer.pipeline import publish
    from infer.report.measurements import memory

    def probe(*_: object, **__: object) -> memory.Memory:
        return memory.Memory(failure="not measured here")

    publish.memory = SimpleNamespace(probe=probe, stored_weights=memory.stored_weights)  # type: ignore[assignment]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run_all(words: list[str]) -> list[Ending]:
    """Run everything whose label holds all the words."""
    endings: list[Ending] = []
    folder = Path(tempfile.mkdtemp(prefix="infer-gate-"))

    def tell(ending: Ending) -> None:
        endings.append(ending)
        if not ending.good:
            print(f"{ending.result.upper():20} {ending.label}: {ending.said}", flush=True)
        if os.environ.get("GATE_SAYS"):
            print(f"{ending.seconds:5.1f} {ending.result:9} {ending.label}: {ending.said[:300]}", flush=True)

    def wanted(kind: str, label: str) -> bool:
        return all(word in f"{kind} {label}" for word in words)

    try:
        suite = Suite(folder)
        known = faults.combinations()
        planned = [c for c in known if wanted(c[0].kind, f"{c[1]}/{c[2]}/{c[0].name}")]
        twins = {(name, quant) for _, name, quant in planned}
        for name, quant in dict.fromkeys((name, quant) for _, name, quant in known):
            if (name, quant) in twins or wanted("clean", f"{name}/{quant}/clean"):
                tell(suite.clean(SUBJECTS[name], quant))
        for one in faults.HARMLESS:
            for name in one.subjects:
                if wanted(one.kind, f"{name}/none/{one.name}"):
                    tell(suite.clean(SUBJECTS[name], "none", one))
        for one, name, quant in planned:
            tell(suite.fault(one, SUBJECTS[name], quant))
        for subject in graph_faults.subjects():
            for kind, name, _, edit in (("clean", "clean", "", None), *subject.edits):
                if wanted(kind, f"{subject.name}/none/{name}"):
                    tell(suite.graph(subject, "" if edit is None else name, edit))
        for quant in step_faults.QUANTS:
            steps = [one for one in step_faults.FAULTS if quant in one.quants]
            for step in (None, *steps):
                label = f"decoder/{quant}/{step.name if step else 'clean'}"
                if wanted(step.kind if step else "clean", label):
                    tell(suite.step(quant, step))
    finally:
        shutil.rmtree(folder)
        gc.unfreeze()
    return endings


def table(endings: list[Ending]) -> str:
    """Count by kind."""
    columns = (REFUSED, ESCAPED, CRASHED, NO_FAULT, PASSED, CLEAN_REFUSED)
    kinds: dict[str, Counter[str]] = {}
    for ending in endings:
        kinds.setdefault(ending.kind, Counter())[ending.result] += 1
        kinds.setdefault("all", Counter())[ending.result] += 1
    lines = [f"{'kind':20}" + "".join(f"{column:>20}" for column in columns)]
    for kind in sorted(kinds, key=lambda one: (one == "all", one)):
        lines.append(f"{kind:20}" + "".join(f"{kinds[kind][column]:20}" for column in columns))
    return "\n".join(lines)


def main() -> int:
    spare_time()
    start = time.monotonic()
    endings = run_all(sys.argv[1:])
    print(table(endings))
    bad = [ending for ending in endings if not ending.good]
    print(f"{len(endings)} runs in {time.monotonic() - start:.0f} s, {len(bad)} not as they have to be")
    return 1 if bad or not endings else 0


if __name__ == "__main__":
    sys.exit(main())
