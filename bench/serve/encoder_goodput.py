"""Goodput of a sentence encoder with mixed lengths: infer, OpenVINO int8 and sentence-transformers behind one queue.

    python -m bench.serve.encoder_goodput minilm.infer

Requests of one text each arrive at random (Poisson), their lengths log-uniform. One thread takes all that wait, up to
`--rows`, pads them to the longest and runs them: the thin server that a peer would have, the same for every engine,
with arrivals in simulated time and each batch really run. A batch takes the CPU time of this process, one thread, so
that other programs on the machine disturb little. Goodput is the highest rate at which the 99th percentile stays
below `--slo` ms. Answers are compared with sentence-transformers' float32 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.kernels import whole_models_rivals as rivals
from infer import Predictor

Batch = dict[str, np.ndarray]
Engine = Callable[[Batch], np.ndarray]
LEAST_COSINE = 0.97  # of any answer with the float model's


def batch_of(rows: list[np.ndarray]) -> Batch:
    """Return input_ids and attention_mask, int64 [len(rows), longest], padded on the right."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def texts(count: int, low: int, high: int, seed: int) -> list[np.ndarray]:
    """Return rows of token ids: [CLS], words, [SEP]; log-uniform lengths."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.uniform(np.log(low), np.log(high + 1), count)).astype(int)
    return [np.concatenate([[101], draw.integers(1996, 20000, n - 2), [102]]) for n in lengths]


def ours(artifact: str) -> Engine:
    predictor = Predictor.load(artifact, threads=1, trust_code=True)
    wanted = {spec.name for spec in predictor.inputs}
    name = predictor.outputs[0].name
    return lambda batch: predictor.predict({k: v for k, v in batch.items() if k in wanted})[name]


def sentence_transformers(folder: str) -> Engine:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu").eval()

    @torch.inference_mode()
    def run(batch: Batch) -> np.ndarray:
        given = {name: torch.from_numpy(value) for name, value in batch.items()}
        return model(given)["sentence_embedding"].numpy()

    return run


def openvino(folder: str, kept: Path) -> Engine:
    """Return OpenVINO's int8 by NNCF, with pooling and normalization beside it, as its documentation has them."""
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weight = attention_mask.unsqueeze(-1).float()
            return torch.nn.functional.normalize(
                (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1
            )

    path = kept / "float.onnx"
    axes = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "attention_mask")}
    tensors = [
        {name: torch.from_numpy(value) for name, value in batch_of(texts(8, 8, 128, seed)).items()}
        for seed in range(8)
    ]
    rivals.make_onnx(Hidden(), tensors[0], axes, path)
    call = rivals.open_openvino(rivals.make_openvino(path, tensors, is_transformer=True))
    return lambda batch: call({name: torch.from_numpy(value) for name, value in batch.items()}).numpy()


def check(engine: Engine, wanted: Engine, rows: list[np.ndarray]) -> float:
    """Return the smallest cosine of an answer with the float model's, in one padded batch."""
    got, right = engine(batch_of(rows)), wanted(batch_of(rows))
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(right, axis=1)
    return float(((got * right).sum(1) / norms).min())


def p99(engine: Engine, rows: list[np.ndarray], rate: float, most: int) -> float:
    """Return the 99th percentile in ms of the time from arrival to answer, at `rate` requests a second."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(rows)))
    now, first, took = 0.0, 0, np.zeros(len(rows))
    while first < len(rows):
        now = max(now, arrivals[first])
        last = min(int(np.searchsorted(arrivals, now, side="right")), first + most)
        began = time.process_time()
        engine(batch_of(rows[first:last]))
        now += time.process_time() - began
        took[first:last] = now - arrivals[first:last]
        first = last
    return float(np.quantile(took, 0.99)) * 1e3


def goodput(
    engine: Engine, rows: list[np.ndarray], most: int, slo: float, clock: Callable[[], float]
) -> float:
    """Return the highest rate, within 5 %, that keeps p99 below `slo` ms."""
    low, high = 1.0, 4.0
    while p99(engine, rows, high, most) <= slo:
        low, high = high, high * 2
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if p99(engine, rows, middle, most) <= slo else (low, middle)
    return low


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--folder", help="Hugging Face folder; default: MiniLM of models/minilm.py")
    parser.add_argument("--slo", type=float, default=50.0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 256))
    parser.add_argument("--requests", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = asked.folder
    if folder is None:
        sys.path.insert(0, "models")
        import minilm

        folder = str(minilm.checkpoint_folder())
    with tempfile.TemporaryDirectory() as kept:
        right = sentence_transformers(folder)
        engines: dict[str, Engine] = {"infer": ours(asked.artifact)}
        if (reason := rivals.missing("OpenVINO")) is None:
            engines["openvino-int8"] = openvino(folder, Path(kept))
        else:
            print(f"no OpenVINO: {reason}")
        engines["sentence-transformers"] = right
        rows = texts(asked.requests, *asked.lengths, seed=1)
        found: dict[str, dict[str, float]] = {}
        for name, engine in engines.items():
            cosine = check(engine, right, rows[:16])
            if cosine < LEAST_COSINE:
                print(f"{name}: cosine {cosine:.4f} is below {LEAST_COSINE}: not timed")
                continue
            rate = goodput(engine, rows, asked.rows, asked.slo)
            found[name] = {"requests_per_second": rate, "smallest_cosine": cosine}
            print(
                f"{name:24} {rate:8.1f} requests/s at p99 <= {asked.slo:g} ms, cosine {cosine:.4f}",
                flush=True,
            )
        for name in found:
            if name != "infer" and "infer" in found:
                ratio = found["infer"]["requests_per_second"] / found[name]["requests_per_second"]
                print(f"infer / {name}: {ratio:.2f}")
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
