"""Language model step as `infer optimize` makes it, and timed calls of it.

Random weights can't pass the fidelity gate and have no float form worth compiling, so the pipeline is run by its
own functions up to the lowered step; the bench compares its logits with transformers' itself.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import backends
from bench.llm.decoder_shapes import Shape, made
from infer import attention, compress, kernels, plugins
from infer import device as hardware
from infer.compress import assign
from infer.graph import capture, storage
from infer.graph.program import StreamedGraph
from infer.kernels import cpu
from infer.kernels.cpu import weight_layout
from infer.llm.engine.cache.block_manager import new_cache
from infer.llm.step import paged_step
from infer.llm.step.full_sequence_runner import attention_inputs
from infer.llm.step.step_shape import StepShape
from infer.plan import Plan
from infer.reporter import Reporter
from infer.run import stages
from infer.run.find_llm_mode import find_mode
from infer.run.float_graph import LlmMode

PACKINGS = "compiled/packed.json"  # of the inductor backend
HEADS = {"8 bit head": "int8", "4 bit head": "nf4"}  # of the head and the embedding that it shares
# Code that decides on the compiled form; the native kernels are found when it is opened.
MAKERS = (attention, kernels, compress, backends, paged_step, capture, stages)


def prepare(shape: Shape, head: str, threads: int) -> Path:
    """Return the folder of the lowered step, made anew when its sources, torch or the machine changed."""
    folder = shape.folder / f"{head.replace(' ', '-')}-{digest()}"
    for old in shape.folder.glob(f"{head.replace(' ', '-')}-*"):
        if old != folder:
            shutil.rmtree(old)

    def make(place: Path) -> None:
        place.mkdir()
        pins = {"*lm_head": HEADS[head]}
        lower(
            str(shape.checkpoint), place, threads, quant="nf4", layers=pins, data="random", calibrate="none"
        )

    return made(folder, make)


def prepare_file(shape: Shape, format: str, file: Path, threads: int) -> Path:
    """Return the folder of the step that computes with the codes of a GGUF file, made anew like that of `prepare`."""
    folder = shape.folder / f"{format}-codes-{digest()}"
    for old in shape.folder.glob(f"{format}-codes-*"):
        if old != folder:
            shutil.rmtree(old)

    def make(place: Path) -> None:
        place.mkdir()
        lower(str(file), place, threads, quant="keep", data="random", calibrate="none")

    return made(folder, make)


def twin(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Return logits float32 [vocab] of the last token by the slow, portable operators; cached, they take a minute."""

    def make(path: Path) -> None:
        shape = msgspec.json.decode((folder / "shape.json").read_bytes(), type=StepShape)
        blocks = -(-len(tokens) // shape.page)
        named = attention_inputs(shape, [0], [len(tokens)], torch.arange(blocks, dtype=torch.int32)[None])
        last = torch.tensor([len(tokens) - 1])
        with torch.no_grad():
            call = storage.load(folder).callable()
            given = {"token_ids": torch.tensor(list(tokens)), "logit_rows": last, **named}
            logits = call(**given, kv_cache=shape.new_cache(blocks))[0]
        save_file({"logits": logits[0].float().contiguous()}, path)

    return load_file(made(folder / f"twin-{len(tokens)}.safetensors", make))["logits"]


def lower(source: str, place: Path, threads: int, *, backend: str = "inductor", **options: Any) -> None:
    """Load, assign formats, quantize, capture and lower into `place`; `options` are those of the plan."""
    plan = Plan(source=source, backend=backend, device="cpu", threads=threads, **options)
    reporter = Reporter()
    run = stages.resolve(plan)
    stages.prepare_kernels(run.plan, reporter)
    loaded, run = stages.load(run)
    mode = LlmMode(*find_mode(run.plan, loaded, reporter))
    module: Any = loaded.module
    graph = StreamedGraph(
        loaded.inputs, loaded.inputs, loaded.samples, loaded.sizes, loaded.task, module=module
    )
    original = stages.Original(loaded, graph, mode)
    assignment = stages.make_assignment(run.plan, original)
    assign.decide(assignment)
    small = stages.compress_model(run.plan, original, assignment)
    if small.shape is None:
        raise SystemExit(f"{source} has no step: {small.scores_only}")
    storage.save(small.graph, place)
    plugins.get("backends", backend).lower(small.graph, run.plan, place)
    (place / "shape.json").write_bytes(msgspec.json.encode(small.shape))


class InferStep:
    """An opened step with a cache for `sequences` × `length` tokens; tokens are those of the shape."""

    def __init__(self, folder: Path, *, length: int, sequences: int = 1) -> None:
        self.shape = msgspec.json.decode((folder / "shape.json").read_bytes(), type=StepShape)
        self.runner: backends.Runner = plugins.get("backends", "inductor").open(folder, "cpu")
        self.num_bytes = packed_bytes(folder) or weight_bytes(folder)
        blocks = -(-length // self.shape.page)
        self.table = torch.arange(sequences * blocks, dtype=torch.int32).reshape(sequences, blocks)
        self.cache = new_cache(self.shape.layers, sequences * blocks, self.shape.page_bytes)

    def kv_bytes(self, context: int) -> int:
        """Return the cache bytes that a decode step after `context` tokens of one sequence reads."""
        return self.shape.layers * self.shape.page_bytes * (context + 1) // self.shape.page

    def call(self, tokens: Sequence[int], done: Sequence[int], new: Sequence[int]) -> Callable[[], Tensor]:
        """Build a step in which sequence i, with `done[i]` cached tokens, gets the next `new[i]` of `tokens`.

        It gives the logits of the last token of each. Its inputs are arranged once, before.
        """
        blocks = -(-max(d + n for d, n in zip(done, new, strict=True)) // self.shape.page)
        named = attention_inputs(self.shape, done, new, self.table[: len(new), :blocks].contiguous())
        ids = torch.tensor(list(tokens))
        ends = named["query_start"][1:].long() - 1
        inputs = {"token_ids": ids, "logit_rows": ends, "kv_cache": self.cache, **named}
        return lambda: self.runner.run(inputs)["logits"]

    def decoding(self, token: int, context: int, sequences: int = 1) -> Callable[[], Tensor]:
        return self.call([token] * sequences, [context] * sequences, [1] * sequences)

    def prefill(self, tokens: Sequence[int]) -> Callable[[], Tensor]:
        return self.call(tokens, [0], [len(tokens)])

    def restore(self, cache: Tensor) -> None:
        """Copy the cache of one sequence, pages in order, to every sequence."""
        pages = cache.shape[1]
        for row in self.table.long():
            self.cache[:, row[:pages]] = cache[:, : len(row)]

    def close(self) -> None:
        self.runner.close()


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the tensors in `folder`/weights, without headers."""
    return sum(
        path.stat().st_size - 8 - int.from_bytes(path.open("rb").read(8), "little")
        for path in (folder / "weights").rglob("*.safetensors")
    )


def packed_bytes(folder: Path) -> int:
    """Return the bytes of a file's codes as packed for this CPU, which a decode step reads; 0 without any."""
    path = folder / PACKINGS
    if not path.exists():
        return 0
    packings = msgspec.json.decode(path.read_bytes(), type=list[weight_layout.AnyPacking])
    layers = [
        layer
        for packing in packings
        if isinstance(packing, weight_layout.Packing) and packing.kind == weight_layout.GROUPWISE
        for layer in packing.layers
    ]
    shapes = (
        part
        for layer in layers
        for part in weight_layout.operand_shapes(
            weight_layout.GROUPWISE, layer, cpu.blocks(layer.rows)
        ).values()
    )
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def digest() -> str:
    """Hash everything that changes the lowered step: sources of the packages and modules, torch, machine."""
    files = [Path(str(maker.__file__)) for maker in MAKERS]
    paths = {p for file in files for p in (file.parent.rglob("*.py") if file.stem == "__init__" else [file])}
    data = b"".join(path.read_bytes() for path in sorted(paths))
    about = repr((torch.__version__, hardware.fingerprint("cpu"), inspect.getsource(lower))).encode()
    return hashlib.sha256(data + about).hexdigest()[:12]
