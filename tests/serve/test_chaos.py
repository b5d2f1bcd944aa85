"""Server process under faults: full log disks, few file descriptors, SIGSTOP and SIGKILL in every phase."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.raw_http import ROOT, get
from tests.support.worker_models import alive, body_of, children, serving, wait_until

pytestmark = pytest.mark.chaos
INFER = "/v2/models/faulty/infer"
FULL = Path("/dev/full")
full_disk = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def right(url: str, value: float) -> bool:
    answer = httpx.post(f"{url}{INFER}", json=body_of(value), timeout=60)
    return answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [2 * value] * 4


def ready(url: str) -> bool:
    return httpx.get(f"{url}/ready").status_code == 200


@full_disk
def test_full_log_disk_stops_neither_responses_restarts_nor_shutdown() -> None:
    with FULL.open("w") as full, serving(stderr=full, log=True) as (running, url):
        assert all(right(url, value) for value in range(20))
        (worker,) = children(running.pid)
        os.kill(worker, signal.SIGKILL)  # which is logged too
        assert all(right(url, value) for value in range(5))
        assert httpx.post(f"{url}{INFER}", content=b"{").status_code == 400

        def dropped() -> float:
            found = re.search(r"^infer_log_dropped_total (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
            return float(found[1]) if found else 0.0

        wait_until(lambda: dropped() >= 20)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


@full_disk
def test_server_with_unwritable_output_still_serves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code = f"""
import sys
from tests.support.fake_predictors import double
from infer.serve.http.listener import listen
from infer.serve.server import serve
from infer.serve.service import Service
with listen("127.0.0.1", {port}) as listener:
    sys.exit(serve(Service([double()]), listener))
"""
    with FULL.open("w") as full:
        running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=full)
        try:

            def answers() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
                assert running.poll() is None
                return False

            wait_until(answers)
            running.send_signal(signal.SIGTERM)
            assert running.wait(20) == 0
        finally:
            running.kill()
            running.wait()


def test_low_file_limit_bounds_connections_and_serves_open_ones() -> None:
    with serving(files=150) as (running, url), httpx.Client(base_url=url, timeout=20) as old:
        assert old.get("/ready").status_code == 200
        host, port = url.removeprefix("http://").split(":")
        held = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, int(port)), timeout=0.5))
        answer = old.post(INFER, json=body_of(3))
        assert answer.status_code == 200
        for connection in held:
            connection.close()
        wait_until(lambda: right(url, 4))
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        said = running.stderr.read() if running.stderr else ""
    assert "only 150 files may be open" in said
    assert "Traceback" not in said


def test_server_continues_after_sigstop_and_sigcont() -> None:
    with serving() as (running, url):
        assert right(url, 1)
        answers: list[bool] = []
        os.kill(running.pid, signal.SIGSTOP)
        threads = [
            threading.Thread(target=lambda v=value: answers.append(right(url, v))) for value in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        assert answers == []
        os.kill(running.pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert answers == [True] * 4
        assert ready(url)


def test_sigterm_during_worker_restart_exits_with_0_at_once() -> None:
    with serving(options={"opening": 1.5}) as (running, url):
        (worker,) = children(running.pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not ready(url))
        wait_until(lambda: bool(children(running.pid)) and children(running.pid) != [worker])
        (second,) = children(running.pid)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert not alive(second)


def test_requests_queued_during_worker_restart_are_answered() -> None:
    with serving(options={"opening": 1.0}) as (running, url):
        (worker,) = children(running.pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not ready(url))
        assert right(url, 5)
        assert ready(url)


def test_worker_ignores_stop_signals() -> None:
    with serving() as (running, url):
        (worker,) = children(running.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            os.kill(worker, number)
        assert right(url, 6)
        assert children(running.pid) == [worker]


def test_client_reset_at_any_point_affects_no_other_client() -> None:
    with serving(options={"seconds": 0.05}) as (running, url):
        host, port = url.removeprefix("http://").split(":")
        for size in (0, 10, 40):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(get(INFER.encode(), method=b"POST")[:size])
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert right(url, 7)
        assert running.poll() is None
