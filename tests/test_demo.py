"""`make demo` ends with a screen that says what happened and what to try next."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "models" / "demo.py"


def test_the_demo_ends_on_one_screen_with_commands_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    text = demo.closing("How do I stop?", "A sentence that answers. " * 60, "(one fact,\nanother)")
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert "Question: How do I stop?" in lines
    assert "infer serve minilm.infer" in text
    assert "infer optimize YOUR_MODEL" in text
