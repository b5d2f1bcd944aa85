"""Predictor: an opened artifact. Numpy in, numpy out; torch in, torch out; safe to call from many threads."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from . import artifact, capture, fidelity, folders, plugins
from . import device as hardware
from .errors import ArtifactError, InputError, NotUsableError, UsageError
from .generate import StepShape, Windows, cuda_graphs
from .spec import LIMITS, Finding, precision_class
from .text import Tokenizer

Array = np.ndarray | Tensor


class Predictor:
    """`with Predictor.load("model.infer") as p: p.predict({"image": array})`.

    `inputs`, `outputs`: tuples of `TensorSpec`; `sizes`: symbolic size → (smallest, largest); `report`: the dict of
    report.json; `notes`: what was noticed while opening (lowered again for this machine, …).
    """

    def __init__(self, folder: Path, manifest: artifact.Manifest, runner: Any, notes: list[Finding]) -> None:
        self.path, self.manifest, self.notes = folder, manifest, notes
        self.name, self.version, self.task = manifest.name, manifest.version, manifest.task
        self.inputs, self.outputs, self.sizes = manifest.inputs, manifest.outputs, manifest.sizes
        self.max_batch = self.sizes.get("batch", (1, 1))[1]
        self.padding: dict[str, int] = {}
        self._runner, self._lock = runner, threading.Lock()
        self._tokenizer: Tokenizer | None = None
        if (folder / "tokenizer.json").exists():
            self.padding = {"input_ids": int(manifest.meta.get("pad_id") or 0), "attention_mask": 0}

    @classmethod
    def load(
        cls, path: str | Path, *, device: str = "auto", threads: int | None = None, trust_code: bool = False
    ) -> Self:
        """Verify hashes and trust, open (lowering again where the machine differs), run the golden inputs.

        Raises `ArtifactError` (damaged, foreign, wrong numbers), `UnsafeSourceError` (code nobody trusts),
        `NotUsableError` (its backend can't run here).
        """
        folder = Path(path)
        manifest = artifact.read_manifest(folder)
        artifact.verify(folder, manifest)
        backend = plugins.get("backends", manifest.backend)
        if reason := backend.missing():
            raise NotUsableError(f"backend {manifest.backend} is not usable on this machine: {reason}")
        if threads:
            torch.set_num_threads(threads)
        place = hardware.resolve(manifest.device if device == "auto" else device).value
        hardware.use_tf32(manifest.plan.dtype, place)
        if backend.EXECUTES_CODE and not trust_code:
            artifact.require_trust(folder, f"backend {manifest.backend}")
        notes: list[Finding] = []
        differs = _differences(manifest.target, backend.target(place))
        opened = (
            _lower_again(folder, manifest, backend, place, differs, trust_code, notes) if differs else folder
        )
        runner = backend.open(opened, place)
        if (shape := generation_shape(manifest)) is not None:
            runner = Windows(cuda_graphs.wrap(runner, place), shape, place)
        predictor = cls(folder, manifest, runner, notes)
        try:
            predictor.self_test(exact=not differs)
        except ArtifactError:
            predictor.close()
            raise
        return predictor

    def predict(self, inputs: Any) -> Any:
        """Run one batch; more rows than `max_batch` run in pieces.

        A mapping of arrays gives a mapping; a bare array, for a model of one input, a bare array when there is one
        output; a list of such requests the list of their answers, batched together where shapes allow.
        Raises `InputError` naming the input, what was expected and what came.
        """
        if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
            return (
                self._predict_rows(inputs) if self._stackable(inputs) else [self.predict(i) for i in inputs]
            )
        bare = not isinstance(inputs, Mapping)
        if bare and len(self.inputs) != 1:
            raise InputError(f"expected a mapping with {self._names()}, got {type(inputs).__name__}")
        named: Mapping[str, Array] = {self.inputs[0].name: inputs} if bare else inputs
        as_torch = any(isinstance(value, Tensor) for value in named.values())
        outputs = self._run_pieces(self._check(named))
        answer = {name: value if as_torch else value.numpy() for name, value in outputs.items()}
        return next(iter(answer.values())) if bare and len(answer) == 1 else answer

    def _stackable(self, requests: Sequence[Any]) -> bool:
        shapes = {tuple(sorted((k, np.shape(v)[1:]) for k, v in self._named(r).items())) for r in requests}
        return self._batched and len(requests) > 1 and len(shapes) == 1

    def _named(self, request: Any) -> Mapping[str, Any]:
        return request if isinstance(request, Mapping) else {self.inputs[0].name: request}

    def _predict_rows(self, requests: Sequence[Any]) -> list[Any]:
        checked = [self._check(self._named(request)) for request in requests]
        joined = {name: torch.cat([one[name] for one in checked]) for name in checked[0]}
        outputs, answers, start = self._run_pieces(joined), [], 0
        for request, one in zip(requests, checked, strict=True):
            stop = start + len(next(iter(one.values())))
            rows = {name: value[start:stop] for name, value in outputs.items()}
            as_torch = any(isinstance(value, Tensor) for value in self._named(request).values())
            answer = {name: value if as_torch else value.numpy() for name, value in rows.items()}
            bare = not isinstance(request, Mapping) and len(answer) == 1
            answers.append(next(iter(answer.values())) if bare else answer)
            start = stop
        return answers

    def _names(self) -> str:
        return ", ".join(str(spec) for spec in self.inputs)

    def _check(self, named: Mapping[str, Any]) -> dict[str, Tensor]:
        if surplus := sorted(set(named) - {s.name for s in self.inputs}):
            raise InputError(
                f"no input named {surplus[0]!r}; expected {self._names()}", where="request.inputs"
            )
        bound: dict[str, int] = {}
        checked: dict[str, Tensor] = {}
        for index, spec in enumerate(self.inputs):
            where = f"request.inputs[{index}]"
            if spec.name not in named:
                raise InputError(f"missing input {spec}", where=where)
            value = named[spec.name]
            value = value if isinstance(value, np.ndarray | Tensor) else np.asarray(value)
            spec.check(value, where, bound)
            checked[spec.name] = (
                value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            )
        for size, actual in bound.items():
            low, high = self.sizes.get(size, (0, actual))
            if not low <= actual <= high and not (size == "batch" and actual > high and self._batched):
                raise InputError(
                    f"expected {size} between {low} and {high}, got {actual}", where="request.inputs"
                )
        return checked

    @property
    def _batched(self) -> bool:
        return all(s.batched for s in (*self.inputs, *self.outputs))

    def _run_pieces(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = len(next(iter(inputs.values()))) if self._batched else 1
        if rows <= self.max_batch:
            return self._run(inputs)
        starts = range(0, rows, self.max_batch)
        parts = [self._run({n: v[i : i + self.max_batch] for n, v in inputs.items()}) for i in starts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._lock:
            if self._runner is None:
                raise UsageError(
                    "this Predictor is closed", hint="Open the artifact again with Predictor.load"
                )
            outputs = self._runner.run(inputs)
        return {name: value.detach().cpu() for name, value in outputs.items()}

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.path / "report.json").read_text())

    @property
    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer; raises `UsageError` when it carries none."""
        if self._tokenizer is None:
            path = self.path / "tokenizer.json"
            if not path.exists():
                raise UsageError(f"{self.name} takes tensors, not text", hint=f"It expects {self._names()}")
            longest = min(
                int(self.manifest.meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1]
            )
            self._tokenizer = Tokenizer(path, max_length=longest, pad_id=self.padding["input_ids"])
        return self._tokenizer

    def tokenize(self, texts: list[str]) -> dict[str, np.ndarray]:
        """`input_ids`, `attention_mask`: int64 [len(texts), longest], only those the model takes."""
        wanted = {spec.name for spec in self.inputs}
        return {name: value for name, value in self.tokenizer.batch(texts).items() if name in wanted}

    def count_tokens(self, texts: list[str]) -> int:
        return sum(len(ids) for ids in self.tokenizer.encode(texts))

    def embed(self, texts: list[str]) -> np.ndarray:
        """float32 [len(texts), dim]; texts of similar length run together, at most `max_batch` at a time."""
        if self.task != "embedding":
            raise UsageError(f"{self.name} is a {self.task} model, not an embedding model")
        rows = self.tokenizer.encode(texts)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        width = self.outputs[0].shape[-1]
        result = np.zeros((len(rows), int(width)), dtype=np.float32)
        for start in range(0, len(order), self.max_batch):
            chosen = order[start : start + self.max_batch]
            result[chosen] = self.predict(self.tokenizer.pad([rows[i] for i in chosen]))[self.outputs[0].name]
        return result

    def warmup(self) -> None:
        """Run the golden inputs at batch 1 and at the largest batch, so that the first request pays for nothing."""
        golden = load_file(self.path / "golden/inputs.safetensors")
        for rows in {1, self.max_batch}:
            self._run({spec.name: spec.with_rows(golden[spec.name], rows) for spec in self.inputs})

    def self_test(self, *, exact: bool = True) -> None:
        """Golden inputs through the runner: equal to what it gave when it was made, and near the float original."""
        inputs = load_file(self.path / "golden/inputs.safetensors")
        outputs = self._run(inputs)
        made = load_file(self.path / "golden/outputs.safetensors")
        plan = self.manifest.plan
        limits = LIMITS["float32"] if exact else LIMITS[precision_class(plan.quant, plan.dtype)]
        reason = fidelity.judge(fidelity.compare(made, outputs, task="tensors"), limits, None)
        if reason:
            raise ArtifactError(
                f"the self-test failed: {reason}",
                where=str(self.path),
                hint="This machine computes other numbers than the one that made it; make the artifact again here",
            )

    def close(self) -> None:
        with self._lock:
            if self._runner is not None:
                self._runner.close()
                self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def generation_shape(manifest: artifact.Manifest) -> StepShape | None:
    """The KV cache of a language model that can generate, else None."""
    found = manifest.meta.get("generation")
    return None if found is None else msgspec.convert(found, StepShape)


def _differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{key} {made.get(key)} → {here.get(key)}"
        for key in sorted({*made, *here})
        if made.get(key) != here.get(key)
    ]


def _lower_again(
    folder: Path,
    manifest: artifact.Manifest,
    backend: Any,
    device: str,
    differs: list[str],
    trust_code: bool,
    notes: list[Finding],
) -> Path:
    """Lower graph.pt2 for this machine into the user's cache; a finished earlier result is used as it is."""
    why = ", ".join(differs)
    if not (folder / capture.PROGRAM).exists():
        raise ArtifactError(
            f"made for another machine ({why}) and it holds no portable graph", where=str(folder)
        )
    if not trust_code:
        artifact.require_trust(folder, "graph.pt2, to lower it again for this machine")
    key = artifact.digest(json.dumps([manifest.files, backend.target(device)], sort_keys=True).encode())
    place = folders.cache("lowered") / key
    notes.append(Finding("open", "lowered again", str(place), why=f"made for another machine: {why}"))
    if place.exists():
        return place
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        fresh = Path(work) / key
        fresh.mkdir(mode=0o700)
        for name in (capture.SIGNATURE, capture.PROGRAM, "weights"):
            (fresh / name).symlink_to((folder / name).resolve())
        backend.lower(capture.load(folder), manifest.plan, fresh)
        with contextlib.suppress(OSError):  # another process was first: its result is equal
            fresh.rename(place)
    return place
