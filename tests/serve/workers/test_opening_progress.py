"""A worker that hangs while it opens its model is ended, and what is waited for is said; one that works is not."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infer.errors import ArtifactError
from infer.kernels.cpu import build
from infer.serve.startup import slow_start_reports
from infer.serve.workers import opening_progress
from infer.serve.workers.messages import Heartbeat, ModelSource
from infer.serve.workers.model_loading import StartingModel
from infer.serve.workers.opening_progress import OpeningWatch
from infer.serve.workers.restart_policy import WatchdogLimits

ROOT = Path(__file__).resolve().parents[3]


def watch_of(limit: float = 3.0) -> OpeningWatch:
    return OpeningWatch("model.infer", 7, limit, lambda: 0.0)


@pytest.mark.chaos
def test_worker_that_hangs_while_it_opens_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening_progress, "BEAT_SECONDS", 60.0)  # what each counts for: two without progress
    source = ModelSource(
        path="faulty", opener="tests.support.worker_models:FaultyModel", options={"opening": 1000.0}
    )
    starting = StartingModel(source, watch=WatchdogLimits(opening=120.0))
    with (
        contextlib.closing(starting),
        pytest.raises(ArtifactError, match="without progress: opening") as found,
    ):
        starting.wait_ready()
    assert "FaultyModel (worker_models.py:" in str(found.value)


def test_heartbeats_without_work_count_as_hung() -> None:
    watch = watch_of()
    watch.note(Heartbeat(work=5.0))
    for _ in range(2):
        watch.note(Heartbeat(work=5.0, doing="waiting"))
    assert not watch.hung
    watch.note(Heartbeat(work=5.001))
    assert watch.hung
    assert watch.doing == "waiting"


def test_heartbeats_with_work_never_count_as_hung() -> None:
    watch = watch_of()
    for second in range(100):
        watch.note(Heartbeat(work=0.02 * second))
        assert not watch.hung


def test_opening_reports_what_it_does_every_thirty_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    watch = OpeningWatch("model.infer", 7, 120.0, lambda: now[0])
    watch.note(Heartbeat(work=1.0, doing="importing modules, in f (x.py:3)"))
    for second in range(0, 70, 10):
        now[0] = second
        watch.report()
    assert [record.getMessage() for record in caplog.records] == [
        f"the worker of model.infer (process 7) is not ready after {n} s: importing modules, in f (x.py:3)"
        for n in (30, 60)
    ]


def test_work_counts_other_threads_and_children() -> None:
    before = opening_progress.work_done()
    until = time.process_time() + 0.1
    thread = threading.Thread(target=lambda: [None for _ in iter(lambda: time.process_time() < until, False)])
    thread.start()
    thread.join()
    between = opening_progress.work_done()
    assert between - before >= 0.05
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    with subprocess.Popen([sys.executable, "-c", burn]) as child:
        child.wait()
    assert opening_progress.work_done() - between >= 0.15


def test_slow_start_of_a_server_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with slow_start_reports(0.01) as ready:
        until = time.monotonic() + 20
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        ready()
    assert "not ready after 0 s, in test_slow_start_of_a_server_says_where_it_is" in caplog.text


def test_startup_line_into_a_full_pipe_does_not_block() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    script = "from infer.serve.startup import print_line; print_line('serving m at http://127.0.0.1:1')"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)
    assert process.returncode == 0
    assert "could not print: serving m at http://127.0.0.1:1 (nobody reads the pipe)" in said


def test_wait_for_another_process_that_compiles_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    with (
        build._build_lock(tmp_path),
        build._build_lock(tmp_path),
    ):  # two descriptors exclude each other as two processes do
        pass
