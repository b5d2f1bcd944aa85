"""Models of a few lines of numpy, and a live server; `python -m tests.support.fake_predictors` serves one."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import uvicorn

from infer.artifact.model_info import ModelInfo
from infer.errors import InputError, NotReadyError
from infer.llm.text.tokenizer import Tokenizer
from infer.serve.fast_path.coalescer import Coalescer
from infer.serve.grpc import RpcListener
from infer.serve.http import http_protocol
from infer.serve.http.app import build
from infer.serve.http.listener import listen
from infer.serve.limits import ServeLimits
from infer.serve.served_model import ServedModel, Speeds
from infer.serve.server import serve
from infer.serve.service import Service
from infer.spec import TensorSpec

if TYPE_CHECKING:
    from infer.predict.predictor import Predictor

Arrays = dict[str, Any]


class Characters(Tokenizer):
    """Tokenizer of a begin token and one token a character; the texts of a pair have "|" between them."""

    def __init__(self) -> None:
        self.max_length, self.pad_id = 512, 0

    def encode_typed(self, texts: Sequence[str | Sequence[str]]) -> tuple[list[list[int]], list[list[int]]]:
        joined = [text if isinstance(text, str) else "|".join(text) for text in texts]
        return [[1, *(2 + ord(letter) % 900 for letter in text)] for text in joined], []


class Fake(ServedModel):
    """`function` takes and gives named arrays; `batches` keeps the row count of every call."""

    def __init__(
        self,
        name: str,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        function: Callable[[Arrays], Arrays],
        *,
        sizes: Mapping[str, tuple[int, int]] | None = None,
        max_batch: int = 8,
        task: str = "tensors",
        padding: dict[str, int] | None = None,
        tokenizer: Callable[[], Tokenizer] = Characters,
        meta: Mapping[str, Any] | None = None,
        path: Path | None = None,
    ) -> None:
        info = ModelInfo(
            name=name,
            task=task,
            inputs=inputs,
            outputs=outputs,
            sizes={"batch": (1, max_batch), **(sizes or {})},
            max_batch=max_batch,
            padding=padding or {},
            backend="fake",
            meta={"vocab_size": 1000} if meta is None else dict(meta),
            path=None if path is None else str(path),
        )
        super().__init__(
            info=info,
            close=lambda: None,
            run=self.predict,
            tokenizer=tokenizer if padding else None,
            warmup=self._warm_up,
        )
        self.function, self.warm = function, False
        self.batches: list[int] = []

    def change(self, **facts: Any) -> None:
        """Replace facts of the model's `info`."""
        self.info = msgspec.structs.replace(self.info, **facts)

    def report(self) -> dict[str, Any]:
        return {}

    def predict(self, inputs: Arrays) -> Arrays:
        first = next(iter(inputs.values()))
        rows = len(first) if np.ndim(first) else 1
        if self.info.inputs[0].shape[:1] == ("batch",) and rows > self.info.max_batch:
            raise InputError(f"{rows} rows are more than {self.info.max_batch}")
        self.batches.append(rows)
        return self.function(inputs)

    def tokenize(self, texts: Sequence[str | Sequence[str]]) -> Arrays:
        arrays = Characters().batch(texts)
        return {name: arrays[name] for name in ("input_ids", "attention_mask")}

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.concatenate([self.function(self.tokenize([text]))["embedding"] for text in texts])

    def _warm_up(self) -> Speeds:
        self.warm = True
        return ()


def double(name: str = "double", *, seconds: float = 0.0, max_batch: int = 8, poison: float = 666.0) -> Fake:
    """Make a predictor of y = 2·x over [batch, 4] that takes `seconds` a batch; a row with `poison` fails its batch."""

    def run(inputs: Arrays) -> Arrays:
        time.sleep(seconds)
        if (inputs["x"] == poison).any():
            raise ValueError("the secret of the model's insides")
        return {"y": inputs["x"] * 2, "rows": np.arange(len(inputs["x"]), dtype=np.int64)}

    x = TensorSpec("x", "float32", ("batch", 4))
    outputs = (TensorSpec("y", "float32", ("batch", 4)), TensorSpec("rows", "int64", ("batch",)))
    return Fake(name, (x,), outputs, run, max_batch=max_batch)


def echo(dtype: str) -> Fake:
    """One input and output of [batch, n], any n from 0 to 9, no padding."""
    specs = TensorSpec("x", dtype, ("batch", "n")), TensorSpec("y", dtype, ("batch", "n"))
    return Fake(dtype, specs[:1], specs[1:], lambda inputs: {"y": inputs["x"]}, sizes={"n": (0, 9)})


def embedder(name: str = "embedder") -> Fake:
    """Three numbers a text: the sum of its ids, how many they are, the last. Blind to padding."""

    def run(inputs: Arrays) -> Arrays:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert not (ids * (1 - mask)).any(), "padding must be 0"
        sums, counts = (ids * mask).sum(1), mask.sum(1)
        last = ids[np.arange(len(ids)), counts - 1]
        return {"embedding": np.stack([sums, counts, last], 1).astype(np.float32)}

    inputs = tuple(TensorSpec(n, "int64", ("batch", "seq")) for n in ("input_ids", "attention_mask"))
    return Fake(
        name,
        inputs,
        (TensorSpec("embedding", "float32", ("batch", 3)),),
        run,
        sizes={"seq": (1, 512)},
        task="embedding",
        padding={"input_ids": 0, "attention_mask": 0},
    )


def classifier(name: str, labels: Sequence[str], **meta: Any) -> Fake:
    """Logits of a text or of a pair "a|b": for each label, how often its first letter is there; NaN for a "?"."""

    def run(inputs: Arrays) -> Arrays:
        ids = inputs["input_ids"] * inputs["attention_mask"]
        counts = [(ids == 2 + ord(label[0])).sum(1) for label in labels]
        logits = np.stack(counts, 1).astype(np.float32)
        logits[(ids == 2 + ord("?")).any(1)] = np.nan
        return {"logits": logits}

    inputs = tuple(TensorSpec(n, "int64", ("batch", "seq")) for n in ("input_ids", "attention_mask"))
    outputs = (TensorSpec("logits", "float32", ("batch", len(labels))),)
    padding = {"input_ids": 0, "attention_mask": 0}
    return Fake(
        name,
        inputs,
        outputs,
        run,
        sizes={"seq": (1, 512)},
        task="classification",
        padding=padding,
        meta={"vocab_size": 1000, "labels": list(labels), **meta},
    )


class Prompt(uvicorn.Server):
    """Ends when it is told, where uvicorn looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.began, self._over = threading.Event(), asyncio.Event()
        self._home: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """From any thread."""
        self.should_exit = True
        if self._home is not None and not self._home.is_closed():
            self._home.call_soon_threadsafe(self._over.set)

    async def main_loop(self) -> None:
        self._home = asyncio.get_running_loop()
        self.began.set()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 1)


class Live(SimpleNamespace):
    """`url`, `host`, `port`, `service` of a server that answers.

    `fast`: its fast path, None without one; `rpc`: HOST:PORT of gRPC, "" without it.
    """


@contextlib.contextmanager
def live(
    *opened: ServedModel | Predictor,
    limits: ServeLimits | None = None,
    api_key: str | Sequence[str] | None = None,
    tls: Any = None,
    hosts: Any = None,
    share_prefix_cache: bool = False,
    fast: bool = True,
    rpc: bool = False,
    tls_files: Sequence[str] = (),
) -> Iterator[Live]:
    """Run a real uvicorn on a free port of 127.0.0.1, in a thread of its own; close the models at the end."""
    models = [model if isinstance(model, ServedModel) else ServedModel.of(model) for model in opened]
    service = Service(models, limits, api_key=api_key, share_prefix_cache=share_prefix_cache)
    app = build(service)
    coalescer = Coalescer(app) if fast else None
    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=1,
        **http_protocol.uvicorn_options(service.limits, service.refused, tls, hosts, coalescer),
    )
    server, failures = Prompt(config), list[BaseException]()

    async def main(listener: Any) -> None:
        service.start()
        rpc_server = None if rpc_port is None else RpcListener(rpc_port, *tls_files).server(app.life)
        if rpc_server is not None:
            await rpc_server.start()
        await server.serve(sockets=[listener])
        if rpc_server is not None:
            await rpc_server.stop()

    def run(listener: Any) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(main(listener))
        except BaseException as error:  # noqa: BLE001 - raised again by the test's thread
            failures.append(error)
        finally:
            server.began.set()

    with listen("127.0.0.1", 0) as listener, listen("127.0.0.1", 0) as bound:
        port, rpc_port = listener.getsockname()[1], bound if rpc else None
        thread = threading.Thread(target=run, args=(listener,))
        thread.start()
        server.began.wait()
        try:
            yield Live(
                url=f"http://127.0.0.1:{port}",
                host="127.0.0.1",
                port=port,
                service=service,
                fast=coalescer,
                rpc=f"127.0.0.1:{bound.getsockname()[1]}" if rpc else "",
            )
        finally:
            server.end()
            thread.join(10)
            for engine in service.models.values():
                engine.stop(NotReadyError("over"))
            service.decoders.close()
            service.pool.shutdown()
            service.grammars.shutdown()
            for model in models:
                model.close()
    assert not failures, failures


if __name__ == "__main__":
    with listen("127.0.0.1", 0) as socket_:
        model = double(seconds=float(sys.argv[1]), max_batch=int(sys.argv[2]))
        sys.exit(serve(Service([model], ServeLimits(drain_seconds=float(sys.argv[3]))), socket_))
