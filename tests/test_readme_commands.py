"""Every command that README and the other pages show is run, in order, in a folder that holds what they name."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from infer.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "models").rglob("*.md")),
]
EXEMPT = {
    "make": "installs, or runs this suite",
    "--ray": "needs the extra `ray`, and a cluster",
}
STARTS = 120.0  # seconds that a server may take to be ready on a busy machine


@dataclass(frozen=True)
class Shown:
    """One command of a page, and the lines that the page shows as its output."""

    page: str
    words: tuple[str, ...]
    output: str

    @property
    def exempt(self) -> bool:
        return any(word in EXEMPT for word in self.words)


def blocks() -> list[list[Shown]]:
    """The commands of each block; a block makes what its later commands need."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            commands = []
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                commands.append(Shown(page.name, tuple(shlex.split(line, comments=True)), output.strip()))
            found.append(commands)
    return found


def named(block: list[Shown]) -> str:
    return " ".join(block[0].words[:3]).replace("/", "-")


RUN = [block for block in blocks() if not all(command.exempt for command in block)]


def test_commands_are_found_and_few_are_exempt() -> None:
    found = [command for block in blocks() for command in block]
    assert {s.words[0] for s in found} == {"make", "infer", "python"}
    assert sum(s.exempt for s in found) <= 3
    assert not re.search(r"```(bash|sh|shell)\b", "".join(p.read_text() for p in PAGES)), (
        "commands stand in ```console"
    )


@pytest.mark.slow
@pytest.mark.timeout(
    1800
)  # each compiles a model in int8 and in float; half a minute to a minute on two free cores
@pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
@pytest.mark.parametrize("block", RUN, ids=named)
def test_every_shown_command_does_what_the_page_says(
    block: list[Shown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose shown output is an error gives that error; every other one ends with 0."""
    pytest.importorskip("transformers")
    shutil.copy(ROOT / "models/digits.pt", tmp_path / "model.pt")
    (tmp_path / "model.py").write_text(_pointing(ROOT / "models/digits.py"))
    (tmp_path / "models").mkdir()
    shutil.copytree(ROOT / "models/pydoc_lm", tmp_path / "models/pydoc_lm")
    shutil.copy(ROOT / "serve.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in (one for one in block if not one.exempt):
        name, *arguments = command.words
        if name == "python" or arguments[0] == "serve":
            ask_once(command)
            continue
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is a list?\n/exit\n"))
        code = main(arguments)
        said = capsys.readouterr()
        where = f"{command.page}: {shlex.join(command.words)}\n{said.out[-2000:]}\n{said.err[-2000:]}"
        if command.output.startswith("infer: "):
            assert (code != 0, said.err.strip()) == (True, command.output), where
        else:
            assert code == 0, where


def _pointing(source: Path) -> str:
    """The recipe of digits, which finds its samples beside itself."""
    return source.read_text().replace("__file__", repr(str(source)))


def ask_once(command: Shown) -> None:
    """Start a server as shown, on a free port, ask its first model something, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "infer", *command.words[1:]] if command.words[0] == "infer" else list(command.words[1:])
    with serving([sys.executable, *words, "--port", str(port)], port) as base:
        model = next(Path(word).stem for word in command.words if word.endswith(".infer"))
        tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.0] * 64}
        body = json.dumps({"inputs": [tensor]}).encode()
        asked = urllib.request.Request(
            f"{base}/v2/models/{model}/infer", data=body, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            assert json.loads(reply.read())["outputs"][0]["shape"] == [1, 10]


@contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """A server that is ready, and ended by SIGTERM with 0."""
    base, deadline = f"http://127.0.0.1:{port}", time.monotonic() + STARTS
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=_environment()) as process:
        try:
            while True:
                assert process.poll() is None, "the server ended by itself"
                assert time.monotonic() < deadline, "the server was not ready in time"
                try:
                    with urllib.request.urlopen(f"{base}/ready", timeout=5):
                        break
                except OSError:
                    time.sleep(0.2)
            yield base
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
