"""Clients of every kind for the long runs (`soak.py`, `disconnect_leaks.py`): one connection a request, raw sockets.

Every answer is compared: digits' logits and pydoc_lm's greedy text are known before the server is started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve import request_forms
from bench.serve.serving import Server, serving
from bench.shared.command_line import parser_of
from bench.shared.example_models import plan
from bench.shared.repository import ROOT
from bench.shared.results import write_results

OPENINGS = ("The", "An exception", "def main", "It is", "When a", "class Point", "The value of", "import")
TOKENS = 24  # of a stream that is compared
LONG = 400  # of a stream that is aborted
SECONDS = 60.0  # after which a request that got no answer is lost


@dataclass
class Answer:
    status: int
    body: bytes
    head: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ExpectedAnswers:
    """Expected answers: `images` and `logits` of digits, `texts` by opening of pydoc_lm."""

    images: np.ndarray
    logits: np.ndarray
    texts: dict[str, str] = field(default_factory=dict)


def make_artifacts(folder: Path) -> tuple[str, str]:
    """Make digits and pydoc_lm in int8 as `infer optimize` does, unless they are there."""
    from infer import optimize

    text = folder / "some.txt"
    text.write_text((ROOT / "models/pydoc_lm/samples.txt").read_text()[:4000])
    digits = plan("digits", batches=(8,))
    language_model = plan("pydoc_lm", batches=(1,), data=str(text))
    made = []
    for name, asked in (("digits", digits), ("pydoc", language_model)):
        path = folder / f"{name}.infer"
        if not path.exists():
            optimize(asked.with_(backend="eager", quant="int8", allow_slower=True), path)
        made.append(str(path))
    return made[0], made[1]


def known_answers(digits: str, pydoc: str) -> ExpectedAnswers:
    """Compute the answers by the Predictor in its own process, which keeps torch out of this one."""
    code = (
        "import sys, json, numpy as np\n"
        "from infer import Predictor\n"
        "images = np.load(sys.argv[3])['held_out_images'][:64, None].astype(np.float32) / 16\n"
        "with Predictor.load(sys.argv[1]) as p: logits = np.asarray(p.predict({'image': images})['logits'])\n"
        "with Predictor.load(sys.argv[2]) as p: texts = {o: p.generate(o, max_tokens=int(sys.argv[4]), "
        "temperature=0.0).text for o in json.loads(sys.argv[5])}\n"
        "print(json.dumps({'images': images.tolist(), 'logits': logits.tolist(), 'texts': texts}))\n"
    )
    samples = str(ROOT / "models/digits_samples.npz")
    command = [sys.executable, "-c", code, digits, pydoc, samples, str(TOKENS), json.dumps(OPENINGS)]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    images, logits = (np.array(found[name], np.float32) for name in ("images", "logits"))
    return ExpectedAnswers(images, logits, found["texts"])


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the parser that the long runs share; see `prepared` and `concluded`."""
    parser = parser_of(description)
    parser.add_argument("--artifacts", type=Path, help="where the two artifacts are kept")
    parser.add_argument("--short", action="store_true", help="write no results")
    return parser


@contextlib.contextmanager
def prepared(kept: Path | None) -> Iterator[tuple[Path, str, str, ExpectedAnswers]]:
    """Yield the log of a server, digits, pydoc_lm and the expected answers; artifacts stay in `kept`."""
    with tempfile.TemporaryDirectory() as folder:
        place = kept or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        digits, pydoc = make_artifacts(place)
        yield Path(folder) / "server.log", digits, pydoc, known_answers(digits, pydoc)


def concluded(name: str, found: dict[str, Any], table: str, *, short: bool) -> int:
    """Print or write the results and return the exit code."""
    if short:
        print(table)
    else:
        write_results(name, found, table)
    return 1 if found["broken"] else 0


def served(command: Sequence[str], log: Path) -> AbstractContextManager[Server]:
    """Start a server by words for Python; its port and process. What it says on stderr goes to `log`."""
    return serving([sys.executable, *command], log=log)


class Client:
    """Client of the server at `port` of 127.0.0.1. Raises `OSError` or `TimeoutError` where there is no answer."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)

    async def ask(self, request: bytes) -> Answer:
        async with asyncio.timeout(SECONDS):
            reader, writer = await self.connect()
            try:
                writer.write(request)
                return parse(await reader.read(-1))
            finally:
                writer.close()

    async def get(self, path: str, *headers: str) -> Answer:
        return await self.ask(get(path, *headers))

    async def post(self, path: str, body: Any) -> Answer:
        return await self.ask(post(path, body))

    async def abort(self, request: bytes, rng: random.Random) -> str:
        """Reset the connection at a random point (while asking, right after, or after some events); return which."""
        reader, writer = await self.connect()
        try:
            point = rng.random()
            if point < 0.2:
                writer.write(request[: rng.randrange(len(request))])
                await asyncio.sleep(rng.random() * 0.02)
                return "asking"
            writer.write(request)
            if point < 0.4:
                await asyncio.sleep(rng.random() * 0.02)
                return "asked"
            for _ in range(rng.randrange(1, 20)):
                line = await asyncio.wait_for(reader.readuntil(b"\n\n"), SECONDS)
                if b" 200 " not in line and b"data:" not in line:
                    return "refused"
            return "reading"
        except asyncio.IncompleteReadError:
            return "cut"
        finally:
            writer.transport.abort()


def get(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: Any, *headers: str) -> bytes:
    return request_forms.post(path, body, "Connection: close", *headers)


def parse(data: bytes) -> Answer:
    start, _, body = data.partition(b"\r\n\r\n")
    if not start.startswith(b"HTTP/1.1 "):
        raise ConnectionError("the server hung up")
    if b"transfer-encoding: chunked" in start.lower():
        body = dechunk(body)
    elif (size := re.search(rb"content-length: (\d+)", start.lower())) and int(size[1]) != len(body):
        raise ConnectionError(f"{len(body)} bytes of {int(size[1])} came")
    return Answer(int(start[9:12]), body, start)


def dechunk(data: bytes) -> bytes:
    """Join the chunks of a body. Raises `ConnectionError` where the last chunk is missing."""
    out = bytearray()
    while data:
        size, _, data = data.partition(b"\r\n")
        if not (count := int(size, 16)):
            return bytes(out)
        out += data[:count]
        data = data[count + 2 :]
    raise ConnectionError("a body without an end")


def tensors(known: ExpectedAnswers, rows: int, first: int, *, binary: bool) -> bytes:
    """Return `rows` images, beginning with number `first`."""
    images = np.take(known.images, range(first, first + rows), axis=0, mode="wrap")
    described: dict[str, Any] = {"name": "image", "datatype": "FP32", "shape": list(images.shape)}
    path = "/v2/models/digits/infer"
    if not binary:
        return post(path, {"inputs": [{**described, "data": images.ravel().tolist()}]})
    described["parameters"] = {"binary_data_size": images.nbytes}
    asked = json.dumps({"inputs": [described]}).encode()
    return post(path, asked + images.tobytes(), f"Inference-Header-Content-Length: {len(asked)}")


def right_logits(known: ExpectedAnswers, answer: Answer, rows: int, first: int) -> bool:
    got = np.array(answer.json["outputs"][0]["data"], np.float32).reshape(rows, -1)
    want = np.take(known.logits, range(first, first + rows), axis=0, mode="wrap")
    return bool(np.abs(got - want).max() <= 2e-3 * max(float(np.abs(want).max()), 1.0))


def completion(opening: str, tokens: int, *, stream: bool, **more: Any) -> bytes:
    asked = {"model": "pydoc", "prompt": opening, "max_tokens": tokens, "temperature": 0, "stream": stream}
    return post("/v1/completions", {**asked, **more})


def streamed_text(body: bytes) -> tuple[str, str]:
    """Return the text, and how it ended: "done", an error's code, or "cut"."""
    text, end = "", "cut"
    for event in body.decode().split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            end = "done"
        elif event.startswith("data: "):
            value = json.loads(data)
            if "error" in value:
                return text, str(value["error"].get("code"))
            text += "".join(choice["text"] for choice in value["choices"])
    return text, end


def samples(exposition: bytes) -> dict[str, float]:
    """Return every sample of a scrape by its name and labels."""
    lines = (line.rpartition(" ") for line in exposition.decode().splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in lines}
