"""The street is one-way: a file imports only from rows above its own, and from plug-in folders only by `plugins`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    "errors", "printable", "quiet", "spec", "results", "old_formats", "options", "option_values",
    "plan", "workload", "thresholds", "folders", "regular_files", "failures", "plugins", "device",
    "kernels", "weights", "quant", "attention", "sources", "in_place", "capture", "onnx", "fidelity",
    "artifact_files", "manifest", "artifact", "golden", "text", "generate", "report", "predict", "floats",
    "trial", "timing", "mixed", "street", "language_step", "selection", "publishing", "pipeline", "bench",
    "inspection", "tune", "serve", "cli", "__main__",
]  # fmt: skip
FILES = sorted((ROOT / "infer").rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT / "infer").with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Absolute names of every module that the file imports, at top level or inside a function."""
    parts = ("infer", *path.relative_to(ROOT / "infer").with_suffix("").parts)
    package = parts if path.name == "__init__.py" else parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{stem}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_from_rows_above_its_own(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    assert own in ROWS, f"{own} has no row: add it to ROWS where it belongs"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "backends":
            pytest.fail(f"{path.name} imports {name}; infer reaches backends only through infer.plugins")
        if parts[0] == "infer" and len(parts) > 1 and parts[1] in ROWS and parts[1] != own:
            assert ROWS.index(parts[1]) < ROWS.index(own), f"{own} may not import {name}"


def test_every_room_stands_in_the_order() -> None:
    assert {room(path) for path in FILES} - {"__init__"} <= set(ROWS)


@pytest.mark.parametrize("path", sorted((ROOT / "backends").glob("*.py")), ids=lambda p: p.name)
def test_backends_import_infer_but_not_each_other(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.module.startswith("backends"), f"{path.name} imports {node.module}"
