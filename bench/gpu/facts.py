"""Facts about a GPU, each from a check of its own; a failed check does not stop the next.

    python -m bench.gpu.facts FOUND.json [DEVICE]

A check prints PASS, a figure, or FAIL with the error. The file is written after each. Exits 1 when one failed. On the
device `cpu` the checks that need no kernel of a GPU run too, which tries this file itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Check = Callable[[], Any]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def _device() -> str:
    """Return the device to check; raise RuntimeError without one."""
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device")
    return device


def _sync() -> None:
    if _device() != "cpu":
        torch.cuda.synchronize()


@check
def machine() -> dict[str, Any]:
    """Return name, multiprocessors, L2 cache and memory of the GPU."""
    found = torch.cuda.get_device_properties(_device())
    names = ("name", "multi_processor_count", "L2_cache_size", "total_memory")
    return {"torch": torch.__version__} | {name: getattr(found, name, None) for name in names}


@check
def crossovers() -> dict[str, Any]:
    """Return the row counts from which another kernel is faster."""
    from infer.kernels.gpu import kernel_thresholds

    return {name: list(rows) for name, rows in kernel_thresholds._table(torch.device(_device(), 0)).items()}


@check
def rows_beyond_65535() -> list[int]:
    """Multiply more rows than a grid's second axis has programs."""
    from infer.kernels.gpu.int8 import linear_int8

    device = _device()
    codes = torch.randint(-127, 128, (64, 64), dtype=torch.int8, device=device)
    y = linear_int8.linear_int8(torch.randn(65_537, 64, device=device), codes, torch.ones(64, device=device))
    _sync()
    return list(y.shape)


@check
def fp8_error() -> float:
    """Return the relative error of a float8 layer against exact sums of the same codes."""
    from infer.kernels.ops.linear_fp8 import to_float8

    codes, scale = to_float8(torch.randn(256, 512, device=_device()))
    x = torch.randn(33, 512, device=_device(), dtype=torch.bfloat16)
    got = torch.ops.infer.linear_fp8(x, codes, scale[:, 0].contiguous(), None).double()
    rows, step = to_float8(x.float())
    want = rows.double() @ codes.double().t() * step * scale[:, 0]
    return float((got - want).norm() / want.norm())


def _step(kv_dtype: str) -> tuple[Any, Any, Any]:
    """Return a tiny random llama in bfloat16, its captured step and its shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from infer.llm.step.paged_step import capture_step
    from infer.llm.step.probe import probe

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    shape = probe(model, kv_dtype=kv_dtype)
    return model, capture_step(model, shape), shape


def _lowered(backend: str, kv_dtype: str = "bfloat16") -> tuple[Any, Any, Any, Path]:
    """Lower and open the step on the GPU: model, runner, shape, folder."""
    from infer import plugins
    from infer.graph import storage
    from infer.plan import Plan

    device = _device()
    model, graph, shape = _step(kv_dtype)
    folder, module = Path(tempfile.mkdtemp()), plugins.get("backends", backend)
    storage.save(graph, folder)
    module.lower(graph, Plan(source="x", backend=backend, device=device, dtype="bfloat16"), folder)
    return model, module.open(folder, device), shape, folder


def _error(model: Any, runner: Any, shape: Any) -> float:
    from infer.llm.step.full_sequence_runner import FullSequenceRunner

    ids = torch.randint(0, 512, (2, 16))
    got = FullSequenceRunner(runner, shape, _device()).run({"input_ids": ids})["logits"].float().cpu()
    with torch.no_grad():
        want = model.to(_device())(ids.to(_device())).logits.float().cpu()
    return float((got - want).norm() / want.norm())


@check
def eager_step() -> float:
    """Return the relative error of the eager step against transformers."""
    model, runner, shape, _ = _lowered("eager")
    return _error(model, runner, shape)


@check
def cache_dtypes() -> dict[str, float]:
    """Return the relative error of the eager step for the other types of keys and values."""
    found = {}
    for kind in ("float16", "int8", "float8_e4m3fn"):
        model, runner, shape, _ = _lowered("eager", kind)
        found[kind] = _error(model, runner, shape)
    return found


@check
def recorded_tokens() -> dict[str, Any]:
    """Return the share of tokens that recorded steps and samplers give as plain ones do, and what was not recorded.

    Products of padded batches round otherwise, so that a few tokens of a random model may differ.
    """
    from infer.llm.step import cuda_graphs

    _, runner, shape, _ = _lowered("eager")
    recorded = cuda_graphs.wrap(runner, _device())
    one, other = (_tokens(step, shape) for step in (recorded, runner))
    equal = [a == b for name in one for a, b in zip(one[name], other[name], strict=True)]
    refused = [f"{f.what}: {f.why}" for f in getattr(recorded, "findings", ()) if f.value == "refused"]
    return {"tokens": len(equal), "equal": sum(equal) / len(equal), "refused": refused}


def _tokens(step: Any, shape: Any) -> dict[str, list[int]]:
    """Return the tokens of an engine for requests of every sampler: greedy, whole, cut and constrained."""
    from infer.llm.engine.engine import Engine
    from infer.llm.engine.requests import Request
    from infer.llm.engine.sampling.sampling_options import Sampling
    from infer.llm.engine.scheduling.engine_limits import EngineLimits

    limits = EngineLimits(step_tokens=64, max_running=8)
    engine = Engine(
        step, shape, tokenizer=None, eos_ids=[0], kv_bytes=64 << 20, limits=limits, device=_device()
    )
    engine.prepare()
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9},
    ]
    asked += [{"temperature": 0, "repetition_penalty": 1.3}, {"temperature": 0, "logit_bias": {7: -100.0}}]
    for i, options in enumerate(asked):
        sampling = Sampling(max_tokens=24, seed=i, ignore_eos=True, **options)
        engine.submit(Request(id=str(i), prompt=[5 + i, 6, 7], sampling=sampling))
    found: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    while not engine.idle:
        for output in engine.step():
            found[output.id] += output.token_ids
    return found


@check
def inductor_step() -> dict[str, Any]:
    """Return the package's device, seconds to lower, relative error, and the findings of CUDA graph capture."""
    from infer.llm.step import cuda_graphs
    from infer.llm.step.full_sequence_runner import FullSequenceRunner

    began = time.perf_counter()
    model, runner, shape, folder = _lowered("inductor")
    took = time.perf_counter() - began
    with zipfile.ZipFile(folder / "compiled/model.pt2") as package:
        names = [name for name in package.namelist() if name.endswith("metadata.json")]
        devices = [json.loads(package.read(name)).get("AOTI_DEVICE_KEY") for name in names]
    graphed = cuda_graphs.wrap(runner, _device())
    error = _error(model, graphed, shape)
    for batch in (1, 4, 1):  # a new cache each: graphs are recorded again, in a pool of their own
        FullSequenceRunner(graphed, shape, _device()).decoding(batch, 40)()
    _sync()
    said = [f"{finding.what}: {finding.value} {finding.why}" for finding in getattr(graphed, "findings", ())]
    return {"devices": devices, "lower_seconds": round(took, 1), "error": error, "findings": said}


@check
def two_recorded_steps() -> list[bool]:
    """Run two recorded steps in turns, with new caches; True where all logits are numbers."""
    from infer.llm.step import cuda_graphs
    from infer.llm.step.full_sequence_runner import FullSequenceRunner

    steps = [
        (cuda_graphs.wrap(runner, _device()), shape) for _, runner, shape, _ in map(_lowered, ("eager",) * 2)
    ]
    finite = []
    for batch in (1, 8, 1, 8):
        calls = [FullSequenceRunner(step, shape, _device()).decoding(batch, 64) for step, shape in steps]
        for _ in range(5):
            logits = [call() for call in calls]
        finite.append(all(bool(value.isfinite().all()) for value in logits))
    return finite


@check
def sampling_microseconds() -> dict[str, int]:
    """Return the time of sampling a vocabulary of 128256 for 1 and 64 sequences."""
    import numpy as np

    from infer.llm.engine.sampling import sampler_device

    found = {}
    for rows in (1, 64):
        logits = torch.randn(rows, 128_256, device=_device())
        for name, asked in {"greedy": (0.0, 0, 0, 0, 0), "top_p": (0.8, 0, 0.9, 0, 0.3)}.items():
            columns = np.array([asked] * rows)
            found[f"{name} {rows}"] = _microseconds(lambda: sampler_device.choose(logits, columns))  # noqa: B023
    return found


@check
def launch_microseconds() -> dict[str, float]:
    """Return the time that Python and launches take for one small table layer, and for the 112 of a 1B step."""
    from infer.kernels.ops.bitpack import pack
    from infer.kernels.ops.coded_weight import CodedWeight

    device = _device()
    codes = pack(torch.randint(0, 16, (64, 64), dtype=torch.uint8), 4).to(device)
    table, scale = torch.randn(1, 16, device=device), torch.ones(64, 1, dtype=torch.int8, device=device)
    x = torch.randn(5, 64, device=device, dtype=torch.bfloat16)
    weight = CodedWeight(codes, scale, table, super_scale=torch.ones(64, device=device))
    each = _microseconds(lambda: torch.ops.infer.linear_codes(x, *weight))
    return {"one layer": each, "step of 112 layers, ms": round(each * 112 / 1e3, 1)}


@check
def first_call_seconds() -> dict[int, float]:
    """Return what the first call of each number of rows costs: a request pays for its kernels unless they are warm."""
    from infer.kernels.ops.bitpack import pack
    from infer.kernels.ops.coded_weight import CodedWeight

    device = _device()
    codes = pack(torch.randint(0, 16, (256, 512), dtype=torch.uint8), 4).to(device)
    table, scale = torch.randn(1, 16, device=device), torch.ones(256, 8, dtype=torch.int8, device=device)
    weight, found = CodedWeight(codes, scale, table, super_scale=torch.ones(256, device=device)), {}
    for rows in (1, 4, 16, 64, 512):
        x = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
        began = time.perf_counter()
        torch.ops.infer.linear_codes(x, *weight)
        _sync()
        found[rows] = round(time.perf_counter() - began, 3)
    return found


def _microseconds(call: Callable[[], object], rounds: int = 50) -> int:
    for _ in range(5):
        call()
    _sync()
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    _sync()
    return round((time.perf_counter() - began) / rounds * 1e6)


def main() -> int:
    """Run every check; return 1 when one failed."""
    path, found, failed = Path(sys.argv[1]), dict[str, Any](), 0
    for function in CHECKS:
        name, began = function.__name__, time.perf_counter()
        try:
            value = function()
            found[name] = "PASS" if value is None else value
        except Exception as error:  # noqa: BLE001 - the next check must run
            failed += 1
            first = (str(error).splitlines() or [""])[0][:300]
            found[name] = f"FAIL {type(error).__name__}: {first}"
            found[f"{name} trace"] = traceback.format_exc()[-1500:]
        print(f"{name}: {found[name]} ({time.perf_counter() - began:.1f} s)", flush=True)
        path.write_text(json.dumps(found, indent=1, default=str))
    print(f"{failed} of {len(CHECKS)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
