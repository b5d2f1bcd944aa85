"""Quickstart and cookbook are followed from top to bottom, each in one folder, as a reader would."""

from __future__ import annotations

import io
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.page_blocks import ROOT, Session, blocks, copy_pydoc

FORMATS = "int8 int8:weight int8:static nf4 int4 fp4 fp8 cluster:3".split()  # noqa: SIM905
BACKENDS = "eager inductor openvino ort trt".split()  # noqa: SIM905
SOURCES = (".pt", ".pt2", ".safetensors", ".onnx", "models/pydoc_lm")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
@pytest.mark.parametrize("page", ["quickstart.md", "cookbook.md"])
def test_commands_of_tutorial_pages_work_as_shown(
    page: str,
    pydoc_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands that README shows too are run by test_readme_commands.py; the language model is ready here."""
    shutil.copytree(pydoc_artifact, tmp_path / "pydoc_lm.infer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a list?\n/exit\n"))
    for name in ("digits.pt", "digits.py", "digits_samples.npz"):
        (tmp_path / "models").mkdir(exist_ok=True)
        shutil.copy(ROOT / "models" / name, tmp_path / "models" / name)
    copy_pydoc(tmp_path / "models")
    monkeypatch.delitem(sys.modules, "net", raising=False)
    of_readme = frozenset(
        command.words for block in blocks(ROOT / "README.md") for command in block.commands()
    )
    session = Session(tmp_path, capsys, brief=True, skip=of_readme)
    for block in blocks(ROOT / "docs" / page):
        text = block.text.replace('"pydoc_lm"', '"pydoc"')  # the name that the shared artifact was made with
        session.run(replace(block, text=text))
    sys.modules.pop("net", None)


def test_the_cookbook_has_every_format_backend_and_source() -> None:
    text = (ROOT / "docs/cookbook.md").read_text()
    assert [name for name in FORMATS if not re.search(rf"--quant {name}\b(?!:)", text)] == []
    assert [name for name in BACKENDS if f"--backend {name}" not in text] == []
    assert [name for name in SOURCES if not re.search(rf"infer optimize \S*{re.escape(name)}\b", text)] == []
