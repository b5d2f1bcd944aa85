"""docs/architecture.md names files that exist and every package, and each way through the program has few steps."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from tests.support.page_blocks import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
PATH = re.compile(r"`((?:infer|backends|tests|models|bench)/[\w./]*)`")


def test_every_file_that_the_page_names_exists() -> None:
    named = PATH.findall(PAGE)
    assert len(named) > 50
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_package_is_described() -> None:
    packages = {f"infer/{path.parent.name}/" for path in (ROOT / "infer").glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `(infer/\w+/)` \|", PAGE, re.MULTILINE))
    assert packages == listed


def test_each_life_has_at_most_ten_steps_that_name_files() -> None:
    lives = re.findall(r"^## Life of [^\n]*\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert len(lives) == 5
    for life in lives:
        steps = re.split(r"^\d+\. ", life, flags=re.MULTILINE)[1:]
        assert 5 <= len(steps) <= 10
        assert sum(bool(PATH.search(step)) for step in steps) >= len(steps) - 1


def test_the_diagram_is_well_formed() -> None:
    ElementTree.parse(ROOT / "docs/architecture.svg")  # noqa: S314 - our own file
