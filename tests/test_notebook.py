"""The notebook of docs/ runs from top to bottom, as a reader would run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "in_memory.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter has many to give
def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, object] = {"__name__": "notebook"}
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {index}", "exec"), names)  # noqa: S102
    assert "Ranking (3, 10) Counter({'other sizes or dtypes': 1})" in capsys.readouterr().out


def test_the_notebook_has_no_stored_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
