"""Honest images, and the pages of an operator, while another client sends files that are slow or large to decode.

    python -m bench.serve.hostile_media [--seconds 20] [--attacks "scans;leaving"]

Attacks, each from one API key, the canary from another: `scans`: six JPEGs of 2,000 scans (440 KB) at once; `slow` and
`many slow`: of as many scans as are allowed, six or 64 at once; `leaving`: two clients that post 16 small PNGs each and
leave; `slow, leaving`: or such JPEGs; `large`: small files that decode to gigabytes; `sounds`: long silences. A
canary, and `/ops/models`, go every 0.5 s. Prints what attackers got, median and worst of the others, and the largest
memory of all processes of the server. A canary without an answer, or one of more than 2 s on a quiet machine, breaks
the bar.
"""

from __future__ import annotations

import argparse
import io
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import wave
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from PIL import Image

from bench.serve.hostile_grammars import served
from bench.serve.reporting import exit_code, progress

HONEST, HOSTILE = "key-of-the-canary", "key-of-the-attack"
SERVER = ["-m", "bench.serve.hostile_media", "--serve", "yes"]
EVERY, WORST = 0.5, 2.0  # seconds between two canaries, and of the bar


def jpeg(side: int, scans: int) -> bytes:
    """Return a progressive JPEG whose last scan comes again and again."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    begin, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[begin:end] * (scans - data.count(b"\xff\xda")) + b"\xff\xd9"


def image(mode: str, size: tuple[int, int], form: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, form, **options)
    return file.getvalue()


def silence(seconds: int, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, seconds * rate, "NONE", ""))
        out.writeframes(bytes(2 * seconds * rate))
    return file.getvalue()


def serve() -> int:
    """Serve a classifier of colors and one of sounds, in the server's own process."""
    from infer.serve import server
    from infer.serve.http.listener import listen
    from infer.serve.service import Service
    from tests.support import fake_media

    with listen("127.0.0.1", 0) as listener:
        service = Service([fake_media.colors(), fake_media.listener()], api_key=[HONEST, HOSTILE])
        return server.serve(service, listener)


def post(url: str, data: bytes, key: str, model: str = "colors", seconds: float = 120) -> str:
    """Return the status and the beginning of a refusal's text, or the name of the failure."""
    form = {"data": {"model": model}, "files": {"file": ("a", data)}, "headers": {"X-Api-Key": key}}
    try:
        answer = httpx.post(f"{url}/predict", timeout=seconds, **form)  # type: ignore[arg-type]
    except httpx.HTTPError as error:
        return type(error).__name__
    return "200" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:90]}"


def hang_up(url: str, data: bytes, count: int) -> None:
    """Send `count` files, each on a connection of its own, and close them before an answer comes."""
    host, port = url.removeprefix("http://").split(":")
    form = {"data": {"model": "colors"}, "files": {"file": ("a", data)}, "headers": {"X-Api-Key": HOSTILE}}
    asked = httpx.Request("POST", f"{url}/predict", **form)  # type: ignore[arg-type]
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
    request = f"POST /predict HTTP/1.1\r\n{head}\r\n".encode() + asked.read()
    connections = [socket.create_connection((host, int(port))) for _ in range(count)]
    for connection in connections:
        connection.sendall(request)
    time.sleep(0.05)
    for connection in connections:
        connection.close()


def at_once(url: str, files: list[bytes], seconds: float, model: str = "colors") -> Counter[str]:
    """Send all files at once, again and again."""
    found, until = Counter[str](), time.monotonic() + seconds
    with ThreadPoolExecutor(len(files)) as pool:
        while time.monotonic() < until:
            found.update(pool.map(lambda data: post(url, data, HOSTILE, model), files))
    return found


def leaving(url: str, data: bytes, seconds: float) -> Counter[str]:
    """Let two clients post 16 files each and leave, again and again."""
    until = time.monotonic() + seconds

    def client(_: int) -> int:
        rounds = 0
        while time.monotonic() < until:
            hang_up(url, data, 16)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as pool:
        return Counter({"left": 16 * sum(pool.map(client, range(2)))})


def nothing(url: str, seconds: float) -> Counter[str]:
    time.sleep(seconds)
    return Counter()


def large() -> list[bytes]:
    """Return files of 2.4 GB, 0.2 GB and 1 GB when they are decoded; of the first only the beginning is true."""
    strip = image("RGB", (28000, 28), "PNG", compress_level=9)
    head = b"IHDR" + struct.pack(">II", 28000, 28000) + strip[24:29]
    return [
        strip[:12] + head + struct.pack(">I", zlib.crc32(head)) + strip[33:],
        image("RGB", (8000, 8000), "PNG", compress_level=9),
        image("RGB", (16383, 4096), "WEBP", lossless=True, method=0),
    ]


ATTACKS: dict[str, Callable[[str, float], Counter[str]]] = {
    "nothing": nothing,
    "scans": lambda url, seconds: at_once(url, [jpeg(8000, 2000)] * 6, seconds),
    "slow": lambda url, seconds: at_once(url, [jpeg(8000, 16)] * 6, seconds),
    "many slow": lambda url, seconds: at_once(url, [jpeg(8000, 16)] * 64, seconds),
    "leaving": lambda url, seconds: leaving(url, image("RGB", (64, 64), "PNG"), seconds),
    "slow, leaving": lambda url, seconds: leaving(url, jpeg(8000, 16), seconds),
    "large": lambda url, seconds: at_once(url, large() * 2, seconds),
    "sounds": lambda url, seconds: at_once(url, [silence(1800)] * 6, seconds, "loudness"),
}


def attacked(name: str, url: str, seconds: float) -> Counter[str]:
    """Attack from a process of its own, so that the canary waits for the server alone; return what it got."""
    command = [sys.executable, "-m", "bench.serve.hostile_media", "--attack", name, "--url", url]
    done = subprocess.run([*command, "--seconds", f"{seconds}"], check=True, capture_output=True, text=True)
    return Counter(json.loads(done.stdout))


class Witness:
    """Canaries, an operator's pages and the memory of the server, until `over`."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid, self.over = url, pid, threading.Event()
        self.seconds: dict[str, list[float]] = {"canary": [], "ops": []}
        self.failures: Counter[str] = Counter()
        self.memory = 0
        self._client = httpx.Client(base_url=url, headers={"X-Api-Key": HONEST}, timeout=120)
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._canary, self._ops, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _every(self, kind: str, ask: Callable[[], httpx.Response]) -> None:
        while not self.over.wait(EVERY):
            began = time.monotonic()
            try:
                status = str(ask().status_code)
            except httpx.HTTPError as error:
                status = type(error).__name__
            if status != "200":
                self.failures[f"{kind}: {status}"] += 1
            self.seconds[kind].append(time.monotonic() - began)

    def _canary(self) -> None:
        files = {"file": ("a", image("RGB", (64, 64), "PNG"))}
        self._every("canary", lambda: self._client.post("/predict", data={"model": "colors"}, files=files))

    def _ops(self) -> None:
        self._every("ops", lambda: self._client.get("/ops/models"))

    def _watch(self) -> None:
        while not self.over.wait(0.05):
            total = 0
            for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue
            self.memory = max(self.memory, total)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--attacks", default="")
    for name in ("serve", "attack", "url"):  # of the processes that it starts
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    if given.attack:
        print(json.dumps(ATTACKS[given.attack](given.url, given.seconds)))
        return 0
    missed = list[str]()
    print("| attack | attackers got | canary, median, worst (s) | ops, median, worst (s) | memory, MB |")
    print("|---|---|---|---|---|")
    for name in given.attacks.split(";") if given.attacks else ATTACKS:
        with served(SERVER) as (url, pid):
            post(url, image("RGB", (64, 64), "PNG"), HONEST)
            witness = Witness(url, pid)
            got = attacked(name, url, given.seconds)
            witness.end()
        figures = [
            f"{sorted(found)[len(found) // 2]:.3f}, {max(found):.3f}" for found in witness.seconds.values()
        ]
        answers = "; ".join(f"{count} × {text}" for text, count in got.most_common()).replace("\n", " ")
        print(
            f"| {name} | {answers} | {figures[0]} | {figures[1]} | {witness.memory / 1e6:.0f} |", flush=True
        )
        for failure, count in witness.failures.items():
            missed.append(f"{name}: {count} × {failure}")
        if (worst := max(witness.seconds["canary"])) > WORST:
            missed.append(f"{name}: a canary took {worst:.1f} s")
        progress(f"{name} done")
    return exit_code(missed)


if __name__ == "__main__":
    sys.exit(main())
