"""Tables of the command line: within the columns of the terminal, and a line for each row in a pipe."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from infer.budget_search.journal import Journal
from infer.budgets import Budgets
from infer.cli import main
from infer.cli.output import print_facts
from infer.plan import Plan
from infer.report import inspection
from infer.spec import Finding
from tests.support.search_records import record

LONG = "of/a/very-long.path_here/" * 8
FACTS = {
    "inputs": ["'x' float32 [1]", "'y' float32 [1]"],
    "holds code": False,
    "data": f"rows from /home/{LONG}",
}
ROWS = [
    Finding("machine", "isa", "avx2"),
    Finding(
        "backend", "openvino", "no", why="openvino is not installed (pip install 'infer-engine[openvino]')"
    ),
    Finding("version", "conflict", "torch 2.13.0", why=f"pip install 'torch<3' into /home/{LONG}"),
]


KEPT = [trial for trial in record().trials if trial.outcome != "skipped"]


def kept_trials(tmp_path: Path) -> None:
    for number in range(3):
        source = tmp_path / f"model{number}.pt"
        source.write_bytes(b"weights")
        for trial in KEPT:
            reason = f"ended by a signal, see /home/{LONG}"
            Journal(Plan(source=str(source)), Budgets()).add(msgspec.structs.replace(trial, reason=reason))


def said(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.setattr(inspection, "doctor", lambda: ROWS)
    if command == "facts":
        print_facts(FACTS, as_json=False)
        return
    if command == "trials":
        kept_trials(tmp_path)
    assert main([command]) == 0


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", ["doctor", "trials", "facts"])
def test_tables_stay_within_the_columns(
    command: str,
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    said(command, tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert columns - 12 < max(map(len, lines)) <= columns


@pytest.mark.parametrize(("command", "rows"), [("doctor", 4), ("facts", 3)])
def test_each_row_is_a_whole_line_in_a_pipe(
    command: str,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    said(command, tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == rows
    assert f"/home/{LONG}" in lines[-1]


def test_trials_stand_below_their_source_one_a_line_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    said("trials", tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    blocks = "\n".join(lines[:-1]).strip().split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [str(tmp_path / f"model{n}.pt") for n in (2, 1, 0)]
    assert [len(block.splitlines()) for block in blocks] == [2 + len(KEPT)] * 3
    assert lines[-1] == f"{3 * len(KEPT)} trials"
