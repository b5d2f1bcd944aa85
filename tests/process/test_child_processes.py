"""Child processes: same imports as the parent, end with it, limits, exits as words, bounded messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infer.errors import ArtifactError, InferError
from infer.process import child, spawn
from infer.process.channel import Channel, ClosedError, MessageBuffer
from infer.process.error_messages import ChildError, decode_error, encode_error
from infer.process.spawn import describe_exit
from tests.support.worker_models import alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and parents are those of Linux")
ROOT = Path(__file__).parents[2]


class Text(msgspec.Struct, tag="text"):
    text: str


class OwnArtifactError(ArtifactError):
    """A class that `infer.errors` does not know."""


def ended(job: Callable[[], int | None]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child.fork(job), 0)[1])


def script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-signal.SIGSEGV, "signal SIGSEGV"), (-40, "signal 40")],
)
def test_an_exit_is_told_by_its_code_or_signal(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_process_has_the_imports_of_its_parent_and_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("said = 'imported'")
    monkeypatch.syspath_prepend(tmp_path)
    code = "import only_here, sys; print(only_here.said, sys.stdin.read(), *sys.argv[1:])"
    done = spawn.run(script(tmp_path, code), [7], given=b"given")
    assert done.stdout.decode().split() == ["imported", "given", str(os.getpid()), "7"]


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        spawn.run(script(tmp_path, "import time; time.sleep(60)"), timeout=0.5)


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from infer.process import child\n"
        "print(child.fork(lambda: time.sleep(60)), flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, str(script(tmp_path, code))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        wait_until(lambda: not alive(pid))


def test_a_fork_exits_with_what_its_job_returns() -> None:
    def fail() -> None:
        raise ValueError

    assert [ended(lambda: 7), ended(lambda: None), ended(fail)] == [7, 0, 1]


@pytest.mark.parametrize("kind", ["addresses", "data"])
def test_memory_beyond_the_limit_is_not_allocated(kind: str) -> None:
    def grow() -> int:
        child.confine(**{kind: 64 << 20})  # type: ignore[arg-type]
        _ = bytearray(16 << 20)
        try:
            _ = bytearray(128 << 20)
        except MemoryError:
            return 5
        return 0

    assert ended(grow) == 5


def test_cpu_time_beyond_the_limit_ends_a_process_with_sigprof() -> None:
    def spin() -> None:
        child.confine(cpu_seconds=0.05)
        while True:
            pass

    assert ended(spin) == -signal.SIGPROF


def test_a_message_that_is_too_long_ends_the_channel() -> None:
    buffer = MessageBuffer[Text](Text, longest=100)
    buffer.add((101).to_bytes(4, "little"))
    with pytest.raises(ClosedError, match="101 bytes"):
        buffer.next()


def test_messages_arrive_whole_and_in_order_and_a_closed_end_is_told() -> None:
    one, other = socket.socketpair()
    sender, receiver = Channel[Text](one, Text), Channel[Text](other, Text)
    assert receiver.receive(0.01) is None
    for text in ("a", "b" * 50_000, ""):
        sender.send(Text(text))
    assert [len(receiver.receive(5).text) for _ in range(3)] == [1, 50_000, 0]  # type: ignore[union-attr]
    sender.close()
    with pytest.raises(ClosedError):
        receiver.receive(5)
    receiver.close()


def test_errors_keep_the_nearest_class_that_both_processes_know() -> None:
    error = decode_error(encode_error(OwnArtifactError("it is damaged", where="a file", hint="Copy it")))
    assert type(error) is ArtifactError
    assert str(error) == "it is damaged - at a file. Copy it"
    assert isinstance(decode_error(encode_error(MemoryError())), MemoryError)
    other = decode_error(encode_error(ValueError("wrong")))
    assert isinstance(other, ChildError)
    assert not isinstance(other, InferError)
    assert str(other) == "ValueError: wrong"
