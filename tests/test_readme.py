"""What README shows is true: its Python runs, its commands exist, its error is the one that is printed."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer

from infer import Plan, optimize
from infer.cli import app, main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_the_first_block_is_the_two_commands_and_they_are_targets_of_the_makefile() -> None:
    language, text = BLOCKS[0]
    assert language == "console"
    commands = re.findall(r"^\$ make (\w+)", text, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in commands)
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = ROOT / "models"
    plan = Plan(
        source=f"{models}/digits.pt",
        model=f"{models}/digits.py:build",
        backend="eager",
        batches=(1,),
        allow_slower=True,  # whether it is equally fast is measured, on a machine that has other work too
    )
    optimize(plan, Path("model.infer"))
    code = next(text for language, text in BLOCKS if language == "python")
    space = {"array": np.zeros((1, 1, 8, 8), "float32")}
    exec(compile(code, "README.md", "exec"), space)  # noqa: S102
    assert space["answer"].shape == (1, 10)


@pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
def test_the_python_of_language_models_runs(
    pydoc_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pydoc_artifact, "pydoc_lm.infer")
    _, code = [text for language, text in BLOCKS if language == "python"]
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    said, _, perplexity = capsys.readouterr().out.strip().rpartition("\n")
    assert said.strip()  # of lines there are as many as were drawn
    assert float(perplexity) > 1


def test_every_command_that_is_shown_parses() -> None:
    command = typer.main.get_command(app)
    shown = [
        line[2:].split("#")[0]
        for _, text in BLOCKS
        for line in text.splitlines()
        if line.startswith("$ infer ")
    ]
    assert shown
    for line in shown:
        _, name, *arguments = shlex.split(line)
        command.commands[name].make_context(name, list(arguments))


def test_the_table_of_commands_is_complete() -> None:
    shown = re.findall(r"^\| `infer (\w+)", README, re.MULTILINE)
    assert list(dict.fromkeys(shown)) == list(typer.main.get_command(app).commands)


def test_the_error_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line, said = re.search(r"\$ infer (optimize model.pt --backend inducter)\n(.*)\n", README).groups()
    assert main(shlex.split(line)) == 2
    assert capsys.readouterr().err.strip() == said


def test_the_house_names_rooms_that_exist() -> None:
    for path in re.findall(r"(?:infer/)[\w/.]+|backends/|models/|tests/|bench/|docs/decisions.md", README):
        assert (ROOT / path).exists(), path
