"""SECURITY.md names tests that exist, and every incident it says is tested is named once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_security_md_names_exists() -> None:
    named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", TEXT)
    assert len(named) > 20
    ours = {name for path in (ROOT / "tests/security").glob("test_*.py") for name in functions(path)}
    for file, name in named:
        assert name in (functions(ROOT / file) if file else ours), name


def test_every_cve_test_is_listed_in_security_md() -> None:
    numbers = set(re.findall(r"CVE-\d{4}-\d+", TEXT))
    for path in (ROOT / "tests/security").glob("test_*.py"):
        for name in functions(path):
            if found := re.match(r"test_cve_(\d{4})_(\d+)_", name):
                assert f"CVE-{found[1]}-{found[2]}" in numbers, name


def test_no_incident_is_both_tested_and_not_applicable() -> None:
    tested, _, other = TEXT.partition("Rows that do not apply")
    assert not set(re.findall(r"CVE-\d{4}-\d+", tested)) & set(re.findall(r"CVE-\d{4}-\d+", other))
