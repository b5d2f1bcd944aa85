"""The step of a language model as `infer optimize` makes it, and calls of it that are timed.

Random weights can't pass the fidelity gate and have no float form worth compiling, so the street is walked by its
own functions up to the lowered step; the bench compares its logits with transformers' itself.
"""

from __future__ import annotations

import hashlib
import inspect
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from lm_shapes import Shape, made
from torch import Tensor

import backends
from infer import capture, pipeline, plugins
from infer import device as hardware
from infer.generate import StepShape
from infer.generate.windows import arrange
from infer.spec import Plan

ROOT = Path(__file__).resolve().parent.parent
HEADS = {"8 bit head": "int8", "4 bit head": "nf4"}  # of the head and the embedding that it shares
SUFFIXES = {".py", ".cpp", ".h"}
ROOMS = ("infer/attention", "infer/kernels", "infer/quant", "backends")
FILES = ("infer/generate/step.py", "infer/capture.py", "infer/pipeline.py")


def prepare(shape: Shape, head: str, threads: int) -> Path:
    """The folder of the lowered step, made anew when the sources that make it, torch or the machine changed."""
    folder = shape.folder / f"{head.replace(' ', '-')}-{_digest()}"
    for old in shape.folder.glob(f"{head.replace(' ', '-')}-*"):
        if old != folder:
            shutil.rmtree(old)

    def make(place: Path) -> None:
        place.mkdir()
        lower(str(shape.checkpoint), place, threads, layers={"*lm_head": HEADS[head]})

    return made(folder, make)


def lower(source: str, place: Path, threads: int, **options: Any) -> None:
    """nf4 unless `options` of the plan say otherwise: load, shrink, capture and compile into `place`."""
    plan = Plan(
        source=source, backend="inductor", device="cpu", threads=threads, data="random", **{"quant": "nf4"} | options
    )
    street = pipeline.Street(plan, pipeline.Watch())
    pipeline.resolve(street)
    pipeline.prepare_kernels(street)
    loaded = pipeline.load(street)
    original = capture.Graph(
        loaded.inputs, (), loaded.samples, loaded.sizes, module=pipeline.module_of(loaded), task=loaded.task
    )
    mix = pipeline.layer_mix(street, loaded, original)
    shrunk = pipeline.shrink(street, loaded, original, mix)
    if shrunk.shape is None:
        raise SystemExit(f"{source} has no step: {[f for f in street.findings if f.what == 'generation']}")
    capture.save(shrunk.graph, place)
    plugins.get("backends", "inductor").lower(shrunk.graph, street.plan, place)
    (place / "shape.json").write_bytes(msgspec.json.encode(shrunk.shape))


class Ours:
    """An opened step with a cache for `sequences` × `length` tokens; tokens are those of the shape."""

    def __init__(self, folder: Path, *, length: int, sequences: int = 1) -> None:
        self.shape = msgspec.json.decode((folder / "shape.json").read_bytes(), type=StepShape)
        self.runner: backends.Runner = plugins.get("backends", "inductor").open(folder, "cpu")
        weights = (folder / "weights").rglob("*.safetensors")
        self.num_bytes = sum(path.stat().st_size for path in weights)
        blocks = -(-length // self.shape.page)
        self.table = torch.arange(sequences * blocks, dtype=torch.int32).reshape(sequences, blocks)
        self.cache = self.shape.new_cache(sequences * blocks)

    def kv_bytes(self, context: int) -> int:
        """What a decode step after `context` tokens of one sequence reads of the cache."""
        return self.shape.layers * self.shape.page_bytes * (context + 1) // self.shape.page

    def call(self, tokens: Sequence[int], done: Sequence[int], new: Sequence[int]) -> Callable[[], Tensor]:
        """A step in which sequence i, with `done[i]` tokens in the cache, gets the next `new[i]` of `tokens`.

        It gives the logits of the last token of each. Its inputs are arranged once, before.
        """
        blocks = -(-max(d + n for d, n in zip(done, new, strict=True)) // self.shape.page)
        named = arrange(self.shape, done, new, self.table[: len(new), :blocks].contiguous())
        ids = torch.tensor(list(tokens))
        ends = named["query_start"][1:].long() - 1
        inputs = {"token_ids": ids, "logit_rows": ends, "kv_cache": self.cache, **named}
        return lambda: self.runner.run(inputs)["logits"]

    def decoding(self, token: int, context: int, sequences: int = 1) -> Callable[[], Tensor]:
        return self.call([token] * sequences, [context] * sequences, [1] * sequences)

    def prefill(self, tokens: Sequence[int]) -> Callable[[], Tensor]:
        return self.call(tokens, [0], [len(tokens)])

    def restore(self, cache: Tensor) -> None:
        """The cache of one sequence, pages in order, in the place of each."""
        pages = cache.shape[1]
        for row in self.table.long():
            self.cache[:, row[:pages]] = cache[:, : len(row)]

    def close(self) -> None:
        self.runner.close()


def _digest() -> str:
    """Of all that decides what is compiled: sources, torch, machine."""
    rooms = [p for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in SUFFIXES]
    data = b"".join(path.read_bytes() for path in sorted([*rooms, *(ROOT / file for file in FILES)]))
    about = repr((torch.__version__, hardware.fingerprint("cpu"), inspect.getsource(lower))).encode()
    return hashlib.sha256(data + about).hexdigest()[:12]
