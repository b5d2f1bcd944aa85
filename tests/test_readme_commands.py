"""Every command that README and the other pages show is run, in order, in a folder that holds the files it names."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.page_blocks import ROOT, Block, Session, blocks, copy_pydoc

SESSIONS = [ROOT / "docs/quickstart.md", ROOT / "docs/cookbook.md"]  # run whole, by test_tutorials.py
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page not in SESSIONS),
    *sorted((ROOT / "models").rglob("*.md")),
]
CONSOLE = [block for page in PAGES for block in blocks(page) if block.language == "console"]
DISTINCT = list({block.text: block for block in reversed(CONSOLE)}.values())[::-1]
RUN = [block for block in DISTINCT if not all(command.exempt for command in block.commands())]


def first_words(block: Block) -> str:
    return " ".join(block.commands()[0].words[:3]).replace("/", "-")


def test_few_documented_commands_are_exempt_from_running() -> None:
    commands = [command for block in CONSOLE for command in block.commands()]
    assert {command.words[0] for command in commands} == {"make", "infer", "python", "curl"}
    assert sum(command.exempt for command in commands) <= 4
    text = "".join(page.read_text() for page in [*PAGES, *SESSIONS] if page.exists())
    assert not re.search(r"```(bash|sh|shell)\b", text), "commands stand in ```console"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one compiles a model in int8 and in float; half a minute on two free cores
@pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
@pytest.mark.parametrize("block", RUN, ids=first_words)
def test_every_shown_command_does_what_the_page_says(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose shown output is an error gives that error; every other one ends with 0."""
    pytest.importorskip("transformers")
    shutil.copy(ROOT / "models/digits.pt", tmp_path / "model.pt")
    source = ROOT / "models/digits.py"
    (tmp_path / "model.py").write_text(source.read_text().replace("__file__", repr(str(source))))
    copy_pydoc(tmp_path / "models")
    shutil.copy(ROOT / "serve.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a list?\n/exit\n"))
    Session(tmp_path, capsys, brief=True).run(block)
