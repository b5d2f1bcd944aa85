"""Planted faults and their clean twins through `optimize`: every fault has to be refused, every clean twin to pass.

`python -m tests.gate.suite [WORD …]` runs all, or those whose kind and label hold every word; prints what is not as it
has to be, and a table by kind; ends with 1 unless every fault was refused and every clean twin passed. GATE_SAYS=1 also
prints how each run ended.

A published fault has *escaped*. One that is less than `measure.FAULT` times what is allowed is *no fault*, a mistake of
this suite. Other exceptions than those of infer, and refusals before the faulty engine ran, are *crashes*.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from bench.shared.unmeasured_memory import skip_memory
from infer import InferError, Plan, Predictor, optimize
from tests.gate import faults, graph_faults, measure, planted, step_faults
from tests.gate.planted import Plant, Tensors
from tests.gate.subjects import MAX_BATCH, MAX_LENGTH, SUBJECTS, Subject, answers
from tests.support import tiny_decoders
from tests.support.llm_artifacts import bytes_as_tokens

REFUSED, ESCAPED, CRASHED, NO_FAULT = "refused", "escaped", "crashed", "no fault"
PASSED, CLEAN_REFUSED = "clean passed", "clean refused"
Size = tuple[float, str]  # times what is allowed, and where


@dataclass(frozen=True)
class Job:
    """One run. A `fault` has to be refused, anything else to pass; `size` measures the fault, or what was published."""

    model: str  # subject and format, SUBJECT/QUANT; shared with the clean twin
    name: str
    kind: str
    why: str
    fault: bool
    plan: Callable[[Path], Plan]  # writes the source into a folder
    plant: Callable[[], Plant]
    size: Callable[[Predictor | None], Size]

    @property
    def label(self) -> str:
        return f"{self.model}/{self.name}"


@dataclass(frozen=True)
class Ending:
    """End of a run; `said` is the refusal, or what is wrong."""

    job: Job
    result: str
    said: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.result in (REFUSED, PASSED)


def run(job: Job, folder: Path) -> Ending:
    """Run one job inside `planted.installed`."""
    start = time.monotonic()
    result, said = _judged(job, folder)
    return Ending(job, result, said, time.monotonic() - start)


def _judged(job: Job, folder: Path) -> tuple[str, str]:
    size, where = job.size(None) if job.fault else (math.inf, "")
    if size < measure.FAULT:
        return NO_FAULT, f"only {size:.2f} times what is allowed ({where})"
    output = folder / "out.infer"
    with planted.planting(job.plant()) as plant, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimize(job.plan(folder), output, replace=True)
        except InferError as error:
            if error.exit_code == 1 or (job.fault and not plant.calls):
                return CRASHED, f"before the faulty engine ran: {error}" if not plant.calls else str(error)
            return (REFUSED if job.fault else CLEAN_REFUSED), str(error)
        except Exception:  # noqa: BLE001 - a traceback is no refusal
            return CRASHED, traceback.format_exc()[-1500:]
        if job.fault:
            return ESCAPED, f"{job.why} {size:.3g} times what is allowed ({where})"
        try:
            with Predictor.load(output, trust_code=True) as predictor:
                size, where = job.size(predictor)
        except InferError as error:
            return CLEAN_REFUSED, f"published, and fails: {error}"
    if size > measure.FAULT:
        return CLEAN_REFUSED, f"published with {size:.2f} times what is allowed ({where})"
    return PASSED, ""


# Modules


def _module_plan(subject: Subject, quant: str, folder: Path) -> Plan:
    path, data = folder / f"{subject.name}_model.py", folder / f"{subject.name}.pt"
    if not path.exists():
        path.write_text(
            "from tests.gate.subjects import SUBJECTS\n\n"
            f"SUBJECT = SUBJECTS[{subject.name!r}]\nINPUTS = dict(SUBJECT.inputs)\n"
            "OUTPUTS, TASK = SUBJECT.outputs, SUBJECT.task\n\n\ndef build():\n    return SUBJECT.build()\n"
        )
        torch.save(subject.rows(), data)
    return Plan(
        source=f"{path}:build",
        backend="planted",
        quant=quant,
        data=str(data),
        allow_slower=True,
        allow_partial=True,
        batches=(),
        max_batch=MAX_BATCH,
        max_length=MAX_LENGTH,
    )


def calls_of(subject: Subject) -> Iterator[Tensors]:
    """Yield calls as a user makes them: held-out rows by eights, few rows, the largest batch, other lengths."""
    rows = {name: value[::2] for name, value in subject.rows().items()}
    count = len(next(iter(rows.values())))
    for size in (8, 1, 2, 3):
        for start in range(0, count if size == 8 else 12, size):
            yield {name: value[start : start + size] for name, value in rows.items()}
    yield {name: value[:MAX_BATCH] for name, value in rows.items()}
    for length in subject.lengths:
        yield subject.of_length(length)


@torch.no_grad()
def unseen_values(subject: Subject) -> Iterator[Tensors]:
    """Yield rows of three times the numbers, and of zeros."""
    rows = subject.rows()
    for factor in (3, 0):
        yield {name: value * factor if value.is_floating_point() else value for name, value in rows.items()}


def _module_size(
    subject: Subject, quant: str, change: planted.Change | None, predictor: Predictor | None
) -> Size:
    """Measure a fault without the pipeline, or what was published, against the float module."""
    module, memory = subject.build(), dict[str, Any]()
    right = partial(answers, subject, module)
    calls = [*calls_of(subject), *(unseen_values(subject) if quant == "none" else ())]

    def judged(inputs: Tensors) -> Tensors:
        if predictor is not None:
            return _tensors(predictor.predict(inputs))
        assert change is not None
        return planted.faulty(change, subject, right, inputs, memory)

    want, got = ([*map(run, calls), *_session(subject, run)] for run in (right, judged))
    return measure.times_allowed(want, got, quant, subject.task)


def _session(subject: Subject, run: Callable[[Tensors], Tensors]) -> list[Tensors]:
    """Call with the state of the call before, and return the last answers."""
    if not subject.carries:
        return []
    found, state = [], {}
    for start in range(64):
        inputs = {name: value[start : start + 2] for name, value in subject.rows().items()}
        found.append(run({**inputs, **state}))
        name, source = subject.carries
        state = {name: found[-1].get(source, inputs[name]).clone()}
    return found[-16:]


def _tensors(values: Mapping[str, Any]) -> Tensors:
    return {name: torch.as_tensor(value) for name, value in values.items()}


def _module_job(subject: Subject, quant: str, one: faults.Fault | None, *, fault: bool) -> Job:
    change = one.change if one else None
    return Job(
        model=f"{subject.name}/{quant}",
        name=one.name if one else "clean",
        kind=one.kind if one else "clean",
        why=one.why if one else "",
        fault=fault,
        plan=partial(_module_plan, subject, quant),
        plant=lambda: Plant(subject, change),
        size=partial(_module_size, subject, quant, change) if fault or one is None else lambda _: (0.0, ""),
    )


# Graphs


def _graph_plan(subject: graph_faults.GraphSubject, folder: Path) -> Plan:
    path = folder / f"{subject.name.replace(' ', '_')}.onnx"
    onnx.save(subject.model, str(path))
    np.savez(path.with_suffix(".npz"), x=subject.rows)
    return Plan(
        source=str(path),
        backend="planted_ort",
        data=str(path.with_suffix(".npz")),
        allow_slower=True,
        batches=(),
        max_batch=MAX_BATCH,
    )


def _graph_size(
    subject: graph_faults.GraphSubject, edit: graph_faults.Edit | None, predictor: Predictor | None
) -> Size:
    want = graph_faults.answer(subject.model, subject.rows)
    if predictor is not None:
        got = np.asarray(predictor.predict({"x": subject.rows})["y"])
    else:
        assert edit is not None
        wrong = copy.deepcopy(subject.model)
        edit(wrong)
        got = graph_faults.answer(wrong, subject.rows)
    return measure.times_allowed([_tensors({"y": want})], [_tensors({"y": got})], "none", "tensors")


def _graph_job(
    subject: graph_faults.GraphSubject, kind: str, name: str, why: str, edit: graph_faults.Edit | None
) -> Job:
    return Job(
        model=f"{subject.name}/none",
        name=name,
        kind=kind,
        why=why,
        fault=edit is not None,
        plan=partial(_graph_plan, subject),
        plant=lambda: Plant(edit=edit),
        size=partial(_graph_size, subject, edit),
    )


# Steps of a language model


def _decoder_plan(quant: str, folder: Path) -> Plan:
    source, data = folder / "decoder", folder / "decoder.pt"
    if not source.exists():
        tiny_decoders.build("llama").save_pretrained(source)
        bytes_as_tokens(source)
        ids = torch.randint(3, 259, (8, 64), generator=torch.Generator().manual_seed(0))
        ids[:, 20] = 104  # of a fault, in every row that may judge
        torch.save({"input_ids": ids}, data)
    return Plan(
        source=str(source),
        backend="planted",
        quant=quant,
        data=str(data),
        kv_dtype="float32",
        allow_slower=True,
        allow_partial=True,
        batches=(),
    )


def _step_job(quant: str, one: step_faults.StepFault | None) -> Job:
    """Make a job of a faulty step, which has no measure of its own: it negates, exchanges or loses whole rows."""
    return Job(
        model=f"decoder/{quant}",
        name=one.name if one else "clean",
        kind=one.kind if one else "clean",
        why=one.why if one else "",
        fault=one is not None,
        plan=partial(_decoder_plan, quant),
        plant=lambda: Plant(step=one.change if one else None),
        size=lambda predictor: (math.inf, "whole rows of logits") if predictor is None else (0.0, ""),
    )


def jobs() -> list[Job]:
    """List all clean twins, harmless differences and faults."""
    found = []
    known = faults.combinations()
    for name, quant in dict.fromkeys((name, quant) for _, name, quant in known):
        found.append(_module_job(SUBJECTS[name], quant, None, fault=False))
    for one in faults.HARMLESS:
        found += [_module_job(SUBJECTS[name], "none", one, fault=False) for name in one.subjects]
    found += [_module_job(SUBJECTS[name], quant, one, fault=True) for one, name, quant in known]
    for subject in graph_faults.subjects():
        found.append(_graph_job(subject, "clean", "clean", "", None))
        found += [_graph_job(subject, *edit) for edit in subject.edits]
    for quant in step_faults.QUANTS:
        found.append(_step_job(quant, None))
        found += [_step_job(quant, step) for step in step_faults.FAULTS if quant in step.quants]
    return found


def chosen(words: list[str]) -> list[Job]:
    """Return the jobs that hold all words, with their clean twins."""
    known = jobs()
    wanted = [job for job in known if all(word in f"{job.kind} {job.label}" for word in words)]
    models = {job.model for job in wanted}
    return [job for job in known if job in wanted or (job.name == "clean" and job.model in models)]


def spare_time() -> None:
    """Skip what takes longer than the rest and judges nothing: the process that measures memory, threads that wait for
    each other, and the garbage collector's way through all that was imported.
    """
    skip_memory()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def table(endings: list[Ending]) -> str:
    """Count by kind."""
    columns = ("planted", REFUSED, ESCAPED, CRASHED, NO_FAULT, PASSED, CLEAN_REFUSED)
    kinds: dict[str, Counter[str]] = {}
    for ending in endings:
        for kind in (ending.job.kind, "all"):
            kinds.setdefault(kind, Counter()).update(
                [ending.result, *(["planted"] if ending.job.fault else [])]
            )
    lines = [f"{'kind':18}" + "".join(f"{column:>15}" for column in columns)]
    for kind in sorted(kinds, key=lambda one: (one == "all", one)):
        lines.append(f"{kind:18}" + "".join(f"{kinds[kind][column]:15}" for column in columns))
    return "\n".join(lines)


def main() -> int:
    spare_time()
    start, endings = time.monotonic(), list[Ending]()
    folder = Path(tempfile.mkdtemp(prefix="infer-gate-"))
    try:
        with planted.installed(folder / "site"):
            for job in chosen(sys.argv[1:]):
                endings.append(ending := run(job, folder))
                if not ending.good or os.environ.get("GATE_SAYS"):
                    print(
                        f"{ending.seconds:6.1f} s {ending.result:13} {job.label}: {ending.said}", flush=True
                    )
    finally:
        shutil.rmtree(folder)
        gc.unfreeze()
    print(table(endings))
    bad = [ending.job.label for ending in endings if not ending.good]
    print(
        f"{len(endings)} runs in {time.monotonic() - start:.0f} s; not as they have to be: {', '.join(bad) or 'none'}"
    )
    return 1 if bad or not endings else 0


if __name__ == "__main__":
    sys.exit(main())
