"""Fenced blocks of Markdown pages, and how a reader would use them: files written, Python run, commands typed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from infer.kernels import cpu

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAMPLE_CHARACTERS = 3000  # of 40,000
STARTS = 300.0  # seconds that a server may take to be ready on a busy machine
BRIEF = {
    "optimize": ("--allow-slower",),
    "bench": ("--seconds", "0.1"),
    "chat": ("--max-tokens", "8"),
}
EXEMPT = {
    "make": "installs, or runs this suite",
    "--ray": "needs the extra `ray`, and a cluster",
    "cuda": "needs an NVIDIA GPU",
}


@dataclass(frozen=True)
class Command:
    """One command of a page, and the lines that the page shows as its output."""

    page: str
    words: tuple[str, ...]
    output: str = ""
    background: bool = False

    @property
    def exempt(self) -> bool:
        return any(word in EXEMPT for word in self.words)

    @property
    def serves(self) -> bool:
        return self.words[0] == "python" and "serve.py" in self.words or self.words[:2] == ("infer", "serve")

    @property
    def shows_error(self) -> bool:
        return self.output.startswith("infer: ")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file name in its title, its text."""

    page: str
    language: str
    title: str
    text: str

    def commands(self) -> list[Command]:
        """Return the commands of a `console` block with the output shown below each."""
        found = []
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            while line.endswith("\\"):
                more, _, output = output.partition("\n")
                line = line[:-1] + more
            background = line.rstrip().endswith("&")
            words = tuple(shlex.split(line.rstrip().removesuffix("&"), comments=True))
            found.append(Command(self.page, words, output.strip(), background))
        return found


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [Block(page.name, *(part or "" for part in found)) for found in FENCE.findall(page.read_text())]


@dataclass
class Session:
    """A terminal and a Python prompt in one folder; servers that were started stop at the end of their block."""

    folder: Path
    capsys: Any
    brief: bool = False  # timings decide nothing, and answers end early
    skip: frozenset[tuple[str, ...]] = frozenset()  # words of commands that another test runs
    names: dict[str, Any] = field(default_factory=dict)

    def run(self, block: Block) -> None:
        """Do what the page asks for: write a file, run Python, or type the commands."""
        if block.title:
            (self.folder / block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, block.page, "exec"), self.names)  # noqa: S102
        elif block.language == "console":
            with ExitStack() as servers:
                port = 0
                for command in block.commands():
                    if command.serves:
                        port = servers.enter_context(serving(command, self.folder))
                    elif not command.exempt and command.words not in self.skip:
                        self.type(command, port)
                    if command.serves and not command.background:
                        ask_once(command, port)

    def type(self, command: Command, port: int) -> None:
        """Run one command; one whose shown output is an error must print that error, any other must end with 0."""
        name, *words = command.words
        where = f"{command.page}: {shlex.join(command.words)}"
        if name == "infer":
            from infer.cli import main

            if self.brief and words[0] in BRIEF and not command.shows_error:
                option, *value = BRIEF[words[0]]
                words += [option, *value] * (option not in words)
            code = main(words)
            printed = self.capsys.readouterr()
            if command.shows_error:
                assert code != 0, where
                assert printed.err.strip().splitlines()[-1] == command.output, where
            else:
                assert code == 0, f"{where}\n{printed.out[-2000:]}\n{printed.err[-2000:]}"
            return
        line = [word.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for word in command.words]
        if name == "curl":
            if shutil.which("curl") is None:
                return
            line.insert(1, "--fail-with-body")
        done = subprocess.run(
            [sys.executable, *line[1:]] if name == "python" else line,
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def ask_once(command: Command, port: int) -> None:
    """Send the first model of a server eight by eight zeros."""
    model = next(Path(word).stem for word in command.words if word.endswith(".infer"))
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.0] * 64}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/{model}/infer",
        data=json.dumps({"inputs": [tensor]}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.loads(response.read())["outputs"][0]["shape"] == [1, 10]


@contextmanager
def serving(command: Command, folder: Path) -> Iterator[int]:
    """Start a server as shown but on a free port, wait until it is ready, and end it by SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", *command.words] if command.words[0] == "infer" else list(command.words[1:])
    line = [sys.executable, *words, "--port", str(port)]
    cpu.why_not()  # compiled before the clock starts: another test may hold the lock of the compilation
    deadline = time.monotonic() + STARTS
    variables = {**environment(), "PYTHONFAULTHANDLER": "1"}
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(line, stdout=printed, stderr=printed, cwd=folder, env=variables) as process,
    ):
        try:
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(
                        f"{command.page}: the server did not start\n{_stacks(process, printed)}"
                    )
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                        break
                except urllib.error.HTTPError as error:
                    if error.code == 401:  # it has keys, and listens
                        break
                    time.sleep(0.2)
                except OSError:
                    time.sleep(0.2)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def _stacks(process: subprocess.Popen[bytes], printed: TextIO) -> str:
    """Return what a server printed; one that runs is aborted first, with its workers, and prints its Python stacks."""
    if process.poll() is None:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")  # none where the kernel does not tell
        for pid in [*" ".join(each.read_text() for each in tasks).split(), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGABRT)
        process.wait(60)
    printed.seek(0)
    return printed.read()[-8000:]


def copy_pydoc(models: Path) -> None:
    """Copy models/pydoc_lm with a part of its texts: calibration and comparison take a fraction of the time."""
    shutil.copytree(ROOT / "models/pydoc_lm", models / "pydoc_lm")
    samples = models / "pydoc_lm/samples.txt"
    samples.write_text(samples.read_text()[:SAMPLE_CHARACTERS])


def environment() -> dict[str, str]:
    """Return this process's environment with the repository on PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
