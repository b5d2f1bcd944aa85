"""Models, texts and server processes of `encoder_goodput`; processor time of a process and its children."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.kernels import whole_models_rivals as rivals
from bench.serve import encoder_servers
from bench.shared.repository import MODELS, ROOT, child_environment, module_command

KEPT = ROOT / ".work" / "encoder-goodput"
START_SECONDS = 180.0
TICKS = os.sysconf("SC_CLK_TCK")


class NotStartedError(RuntimeError):
    """A server that ended, or did not answer in time."""


@dataclass(frozen=True)
class Prepared:
    """A model and its requests; `lengths`: tokens of each text; `vectors`: the float model's, of the first texts."""

    folder: Path
    artifact: Path
    openvino: Path
    texts: list[str]
    lengths: list[int]
    vectors: np.ndarray

    @property
    def name(self) -> str:
        """Name of the artifact, by which every server is asked."""
        found: str = json.loads((self.artifact / "manifest.json").read_text())["name"]
        return found


def prepare(
    name: str, span: tuple[int, int], count: int, backend: str, say: Callable[[str], None]
) -> Prepared:
    """Return what is kept of a model, made where it is missing."""
    import torch

    place = KEPT / name
    place.mkdir(parents=True, exist_ok=True)
    folder = _folder(name, place)
    texts, lengths, rows = draw_texts(folder, span, count)
    artifact, openvino, kept = (
        place / part for part in ("encoder.infer", "openvino-int8.xml", "vectors.npy")
    )
    if not artifact.exists():
        say(f"{name}: making the artifact")
        _make_artifact(folder, artifact, backend)
    if not openvino.exists() and rivals.missing("OpenVINO") is None:
        say(f"{name}: making OpenVINO's int8")
        encoder_servers.make_openvino(str(folder), [rows[at : at + 8] for at in range(0, 64, 8)], place)
    if not kept.exists():
        with torch.no_grad():
            batch = encoder_servers.batch_of(rows[:16])
            module = encoder_servers.pooled_module(str(folder))
            np.save(kept, module(**{key: torch.from_numpy(value) for key, value in batch.items()}).numpy())
    return Prepared(folder, artifact, openvino, texts, lengths, np.load(kept))


def draw_texts(
    folder: Path, span: tuple[int, int], count: int
) -> tuple[list[str], list[int], list[list[int]]]:
    """Return texts of log-uniform length in tokens, their lengths, and their token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    words = [word for word, number in vocabulary if 2000 < number < 20000 and re.fullmatch("[a-z]{3,}", word)]
    draw, texts = np.random.default_rng(0), []
    for length in np.exp(draw.uniform(np.log(span[0]), np.log(span[1] + 1), count)).astype(int):
        texts.append(" ".join(draw.choice(words, length - 2)))
    rows = [tokenizer.encode(text).ids[: span[1]] for text in texts]
    return texts, [len(row) for row in rows], rows


def _folder(name: str, place: Path) -> Path:
    """Return the Hugging Face folder of a model: MiniLM's own, or BERT-base with random weights and MiniLM's files."""
    import torch

    sys.path.insert(0, str(MODELS))
    import minilm

    if name == "minilm":
        return minilm.checkpoint_folder()
    folder = place / "folder"
    if not folder.exists():
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        work = place / "unfinished"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(minilm.checkpoint_folder(), work)
        BertModel(BertConfig()).eval().save_pretrained(work)
        pooling = work / "1_Pooling" / "config.json"
        pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "word_embedding_dimension": 768}))
        work.rename(folder)
    return folder


def _make_artifact(folder: Path, artifact: Path, backend: str) -> None:
    import minilm
    from infer import Plan, optimize

    texts = artifact.with_name("sentences.txt")
    texts.write_text("\n".join(minilm.sentences()) + "\n")
    plan = Plan(
        source=str(folder), data=str(texts), quant="int8", backend=backend, batches=(), allow_slower=True
    )
    optimize(plan, artifact)


@contextmanager
def started(engine: str, model: Prepared, batch_tokens: int) -> Iterator[tuple[int, int]]:
    """Start a server of the engine in a process of its own; yield its port and process id once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, listen = str(model.folder), ["--port", str(port)]
    if engine == "infer":
        command = module_command(
            "infer", "serve", str(model.artifact), *listen, "--threads", "1", "--no-log-requests"
        )
    elif engine == "infinity":
        options = [
            "--engine",
            "torch",
            "--device",
            "cpu",
            "--served-model-name",
            model.name,
        ]
        options += ["--url-prefix", "/v1", "--dtype", "float32", "--batch-size", "32"]
        command = module_command("infinity_emb.cli", "v2", "--model-id", folder, *options, *listen)
    else:
        parts = [engine, folder, str(model.openvino), str(batch_tokens), str(port)]
        command = module_command("bench.serve.encoder_servers", *parts)
    env = child_environment(
        OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1"
    )
    log = KEPT / f"{engine}.log"
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said, env=env) as running:
        try:
            _wait(port, running, log, model.name)
            yield port, running.pid
        finally:
            running.terminate()


def _wait(port: int, running: subprocess.Popen[bytes], log: Path, name: str) -> None:
    """Return when the server embeds a text. Raises `NotStartedError`."""
    import httpx

    until = time.monotonic() + START_SECONDS
    asked = {"model": name, "input": "hello", "encoding_format": "base64"}
    while time.monotonic() < until and running.poll() is None:
        with suppress(httpx.HTTPError):
            if (
                httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=asked, timeout=30).status_code
                == 200
            ):
                return
        time.sleep(0.2)
    last = log.read_text().strip().splitlines()[-1:] or ["nothing"]
    raise NotStartedError(f"the server does not answer; it said: {last[0][:200]}")


def cpu_seconds(pid: int) -> dict[int, float]:
    """Return the processor seconds so far of a process and of its living descendants, by process id."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    found, todo = dict[int, float](), [pid]
    while todo:
        one = todo.pop()
        found[one] = seconds.get(one, 0.0)
        todo += children.get(one, [])
    return found
