"""Trials of one process pack the weights once for a format, whatever the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Plan, plugins
from infer.budget_search.trial_process.messages import Done, Request, Setup
from infer.budget_search.trial_process.session import Session
from infer.report.search_record import Candidate
from infer.reporter import Reporter


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collect the shapes of the blocks of weights that int8 packs."""
    format = plugins.get("infer.compress.formats", "int8")
    shapes, quantize = list[tuple[int, ...]](), format.quantize

    def counted(weight: torch.Tensor, stats: Any, plan: Plan) -> Any:
        shapes.append(tuple(weight.shape))
        return quantize(weight, stats, plan)

    monkeypatch.setattr(format, "quantize", counted)
    return shapes


def run(session: Session, number: int, **candidate: Any) -> Done:
    done = session.run(Request(number=number, candidate=Candidate(quant="int8", **candidate), rivals=()))
    assert done.outcome == "published", done.reason
    return done


def test_weights_are_packed_once_for_all_backends(
    plan: Plan, tmp_path: Path, packed: list[tuple[int, ...]]
) -> None:
    session = Session(
        Setup(plan=plan.with_(allow_slower=True), name="m.infer", work=str(tmp_path)), Reporter()
    )
    first = run(session, 0, backend="eager")
    known = list(packed)
    second = run(session, 1, backend="ort")
    assert known
    assert packed == known
    assert first.measured is not None
    assert second.measured is not None
    assert second.measured.error == pytest.approx(first.measured.error, rel=0.2)


def test_another_calibration_packs_anew(plan: Plan, tmp_path: Path, packed: list[tuple[int, ...]]) -> None:
    session = Session(
        Setup(plan=plan.with_(allow_slower=True), name="m.infer", work=str(tmp_path)), Reporter()
    )
    run(session, 0, backend="eager")
    known = list(packed)
    run(session, 1, backend="eager", calibrate="none")
    assert len(packed) == 2 * len(known)
