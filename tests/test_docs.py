"""Pages that are generated from the code are up to date; docstrings stand alone."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import docs_pages


@pytest.mark.parametrize("name", docs_pages.PAGES)
def test_generated_pages_match_the_code(name: str) -> None:
    written = (docs_pages.ROOT / name).read_text()
    assert written == docs_pages.PAGES[name](), f"{name} is out of date: run make docs-reference"


def test_each_row_of_a_table_is_one_line_with_the_cells_of_its_head() -> None:
    found = []
    for page in [docs_pages.ROOT / "README.md", *sorted((docs_pages.ROOT / "docs").rglob("*.md"))]:
        cells, fenced = 0, False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            fenced ^= line.startswith("```")
            if fenced or not line.startswith("|"):
                cells = 0
                continue
            here = len(re.findall(r"(?<!\\)\|", line)) - 1
            if not line.endswith("|") or (cells and here != cells):
                found.append(f"{page.name}:{number}: {line[:80]}")
            cells = cells or here
    assert not found


def test_a_decision_is_a_record_of_at_most_40_lines() -> None:
    records = sorted((docs_pages.ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert records
    for record in records:
        lines = record.read_text().splitlines()
        assert lines[0].startswith("# "), record.name
        assert len(lines) <= 40, record.name
        assert max(map(len, lines)) <= 120, record.name


def test_code_in_a_table_shows_no_backslash_before_a_pipe() -> None:
    pages = [docs_pages.ROOT / "README.md", *sorted((docs_pages.ROOT / "docs").rglob("*.md"))]
    rows = [line for page in pages for line in page.read_text().splitlines() if line.startswith("|")]
    assert not [row for row in rows if re.search(r"`[^`|]*\\\|[^`]*`", row)]


def test_every_error_class_is_documented() -> None:
    assert not [kind.__name__ for kind in docs_pages.errors() if not docs_pages._what(kind)]


OPENERS = re.compile(r"(What|Who|Whose|Whether|The same|How|Where|When|Why|Which|That|As|If|It|They|This) ")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_no_docstring_opens_with_a_question_or_a_reference() -> None:
    found = []
    for folder in ("infer", "backends", "bench", "models", "tests"):
        for path in sorted((docs_pages.ROOT / folder).rglob("*.py")):
            nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED))
            found += [
                f"{path}: {text}" for node in nodes if OPENERS.match(text := ast.get_docstring(node) or "")
            ]
    assert not found


def test_names_of_tests_have_at_most_70_characters() -> None:
    texts = (path.read_text() for path in (docs_pages.ROOT / "tests").rglob("test_*.py"))
    names = [
        name for text in texts for name in re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.MULTILINE)
    ]
    assert len(names) > 3000
    assert not [name for name in names if len(name) > 70]
