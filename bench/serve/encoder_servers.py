"""Thin servers of `/v1/embeddings` over OpenVINO and sentence-transformers, for `encoder_goodput`.

    python -m bench.serve.encoder_servers ENGINE FOLDER MODEL BATCH_TOKENS PORT   (started by encoder_goodput.py)

The same server for each engine, with as little in it as a peer can have: raw ASGI under uvicorn, the tokenizer called
on the event loop, and one thread that takes what waits in order of arrival, as long as rows x longest stays within
BATCH_TOKENS; 0: one request at a time, as OpenVINO Model Server runs them.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

Batch = dict[str, np.ndarray]
Engine = Callable[[Batch], np.ndarray]
MAX_ROWS = 32


def batch_of(rows: list[list[int]]) -> Batch:
    """Return input_ids and attention_mask, int64 [len(rows), longest], padded on the right."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)], mask[at, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def make_openvino(folder: str, rows: list[list[list[int]]], kept: Path) -> Path:
    """Make OpenVINO's int8 by NNCF, calibrated on batches of token ids, in `kept`."""
    from bench.kernels import whole_models_rivals as rivals
    from bench.kernels.whole_models_sources import Embedder

    axes = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "attention_mask")}
    tensors = [{name: torch.from_numpy(a) for name, a in batch_of(some).items()} for some in rows]
    rivals.make_onnx(Embedder("sdpa", folder).eval(), tensors[0], axes, kept / "float.onnx")
    return rivals.make_openvino(kept / "float.onnx", tensors, is_transformer=True)


def open_openvino(folder: str, model: str) -> Engine:
    from bench.kernels import whole_models_rivals as rivals

    call = rivals.open_openvino(Path(model))
    return lambda batch: call({name: torch.from_numpy(value) for name, value in batch.items()}).numpy()


def open_sentence_transformers(folder: str, model: str) -> Engine:
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(folder, device="cpu").eval()

    @torch.inference_mode()
    def run(batch: Batch) -> np.ndarray:
        found: torch.Tensor = loaded({name: torch.from_numpy(value) for name, value in batch.items()})[
            "sentence_embedding"
        ]
        return found.numpy()

    return run


ENGINES: dict[str, Callable[[str, str], Engine]] = {
    "openvino": open_openvino,
    "sentence-transformers": open_sentence_transformers,
}


class Batcher:
    """Queue in order of arrival, and the thread that runs it."""

    def __init__(self, engine: Engine, batch_tokens: int) -> None:
        self._engine, self._batch_tokens = engine, batch_tokens
        self._waiting: deque[tuple[list[int], asyncio.Future[np.ndarray]]] = deque()
        self._more = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    async def embed(self, row: list[int]) -> np.ndarray:
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, future))
        self._more.release()
        return await future

    def _run(self) -> None:
        while True:
            self._more.acquire()
            if not self._waiting:
                continue
            group = [self._waiting.popleft()]
            longest = len(group[0][0])
            while self._waiting and len(group) < MAX_ROWS:
                wider = max(longest, len(self._waiting[0][0]))
                if wider * (len(group) + 1) > self._batch_tokens:
                    break
                longest = wider
                group.append(self._waiting.popleft())
            vectors = self._engine(batch_of([row for row, _ in group]))
            group[0][1].get_loop().call_soon_threadsafe(_answer, [future for _, future in group], vectors)


def _answer(futures: list[asyncio.Future[np.ndarray]], vectors: np.ndarray) -> None:
    for future, vector in zip(futures, vectors, strict=True):
        future.set_result(vector)


def main(name: str, folder: str, model: str, batch_tokens: int, port: int) -> int:
    import uvicorn
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    engine = ENGINES[name](folder, model)
    engine(batch_of([[101, 102]]))
    batcher = Batcher(engine, batch_tokens)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        asked = msgspec.json.decode(body + message["body"])
        row = tokenizer.encode(asked["input"]).ids
        vector = base64.b64encode((await batcher.embed(row)).tobytes()).decode()
        data = [{"object": "embedding", "index": 0, "embedding": vector}]
        found = msgspec.json.encode({"object": "list", "data": data, "model": asked["model"]})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(found))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": found})

    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="warning", lifespan="off")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])))
