"""One planted fault of each kind through the real pipeline; `make gate` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from infer.library_errors import quiet
from tests.gate import faults, measure, planted, suite

# The language model takes longest; its kinds are those of others. `make gate` runs it.
JOBS = [job for job in suite.jobs() if not job.model.startswith("decoder")]
SLOW = (
    "encoder",
    "embedding",
    "lstm",
    "carried",
    "digits",
)  # to capture; taken for kinds that no other model has
PLANTED = sorted((job for job in JOBS if job.fault), key=lambda job: job.model.startswith(SLOW))
KINDS = {job.kind: job for job in reversed(PLANTED)}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with planted.installed(tmp_path / "site"), quiet():
        yield tmp_path


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_planted_fault_is_refused(folder: Path, kind: str) -> None:
    ending = suite.run(KINDS[kind], folder)
    assert ending.good, f"{ending.job.label}: {ending.result}, {ending.said}"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model", ["plain/none", "plain/nf4", "detector/int8", "graph convolutions/none"])
def test_a_clean_twin_passes(folder: Path, model: str) -> None:
    job = next(job for job in JOBS if job.model == model and job.name == "clean")
    ending = suite.run(job, folder)
    assert ending.result == suite.PASSED, ending.said


@pytest.mark.usefixtures("one_thread")
def test_a_right_engine_that_is_called_faulty_escapes(folder: Path) -> None:
    job = next(job for job in JOBS if job.label == "plain/none/column_zeroed")
    innocent = suite.Job(**{**vars(job), "plant": planted.Plant})
    assert suite.run(innocent, folder).result == suite.ESCAPED


def test_harmless_differences_are_less_than_a_fault() -> None:
    for one in faults.HARMLESS:
        if one.kind != "rounding":
            continue
        for name in one.subjects:
            subject = suite.SUBJECTS[name]
            size, where = suite._module_size(subject, "none", one.change, None)
            assert size < measure.FAULT, f"{name}: {where}"


def test_there_are_at_least_150_faults_of_20_kinds() -> None:
    planned = [job for job in suite.jobs() if job.fault]
    assert len({job.label for job in planned}) == len(planned) >= 150
    assert len({job.kind for job in planned}) >= 20
