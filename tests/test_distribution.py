"""The package index knows `infer` as infer-engine, and every hint to install something names it and an extra it has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import infer
from infer.distribution import DISTRIBUTION, install

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    *(
        path
        for folder in ("infer", "backends", "bench", "models", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions"),
    *(ROOT / name for name in ("README.md", "Makefile", "Dockerfile", "CONTRIBUTING.md")),
]
EXTRA = re.compile(rf"{DISTRIBUTION}\\?\[([\w,]+)\\?\]|\binstall\(['\"](\w+)['\"]\)")
OTHERS = re.compile(r"pip install [^\n`]*(?<![\w/])infer(?![\w-]|\.)")


def test_name_and_version_are_those_of_the_project() -> None:
    assert (PROJECT["name"], PROJECT["version"]) == (DISTRIBUTION, infer.__version__)
    assert install("hf") == "pip install 'infer-engine[hf]'"


def test_what_is_to_be_installed_is_ours_and_exists() -> None:
    texts = {path: path.read_text() for path in TEXTS if path != Path(__file__).resolve()}
    extras = {
        name
        for text in texts.values()
        for found in EXTRA.findall(text)
        for name in ",".join(found).split(",")
    }
    assert extras - {""} <= PROJECT["optional-dependencies"].keys()
    assert {path: found for path, text in texts.items() if (found := OTHERS.findall(text))} == {}
