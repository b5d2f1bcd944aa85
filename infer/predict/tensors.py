"""Tensor inputs: checked against the specs, split into batches that fit, and outputs joined."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifact import store
from ..errors import InferError, InputError, UsageError
from ..spec import BATCH, Finding, Joins, TensorSpec, check_sizes
from .input_fast_path import FastInputs

Array = np.ndarray | Tensor


class CheckedRunner:
    """Runner whose tensors are checked against the specs and split into batches, one call at a time.

    `attention_length`: see `spec.work_of_rows`; None where the runner computes padding. `joins`: which requests may
    share a batch; of a model whose rows depend on each other each request runs whole and alone.
    """

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        sizes: Mapping[str, tuple[int, int]],
        runner: Any,
        joins: Joins = "padded",
    ) -> None:
        self.inputs, self.outputs, self.sizes, self.joins = inputs, outputs, sizes, joins
        self.max_batch = self.sizes.get(BATCH, (1, 1))[1]
        self._fitting = FastInputs(inputs, sizes)
        self._runner, self._lock = runner, threading.Lock()
        self._run_arrays = getattr(runner, "run_arrays", None)
        self.attention_length: int | None = getattr(runner, "attention_length", None)

    @property
    def _batched(self) -> bool:
        """True where requests may share a batch, and be split."""
        return self.joins != "none" and all(spec.batched for spec in (*self.inputs, *self.outputs))

    @property
    def rows_together(self) -> int:
        """The most rows of different texts or images in one run: 1 where rows depend on each other."""
        return self.max_batch if self._batched else 1

    def predict(self, inputs: Any) -> Any:
        """Run one batch; more than `max_batch` rows run in several pieces, unless rows depend on each other.

        - A mapping of arrays by input name returns a mapping of arrays by output name.
        - A bare array, for a model of one input, returns a bare array where there is one output.
        - A list of such requests returns the list of their results, batched together where shapes allow.

        Arrays are numpy or torch, of exactly the dtype and shape of `inputs`; results are of the same library, on the
        CPU. Raises `InputError` with the input, what was expected and what came, and `UsageError` after `close`.
        """
        plain = type(inputs) is dict
        if plain and self._run_arrays is not None and (arrays := self._fitting.arrays(inputs)) is not None:
            with self._lock:
                self._check_open()
                return self._run_arrays(arrays)
        if plain and (fitting := self._fitting.tensors(inputs)) is not None:
            outputs = self._run(fitting)
            if any(isinstance(value, Tensor) for value in inputs.values()):
                return outputs
            return {name: value.numpy() for name, value in outputs.items()}
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
        _require_rows(outputs, joined)
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
        check_sizes(bound, self.sizes, splits=self._batched, joins=self.joins)
        return checked

    def _run_pieces(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = len(next(iter(inputs.values()))) if self._batched else 1
        if rows <= self.max_batch:
            return self._run(inputs)
        starts = range(0, rows, self.max_batch)
        pieces = [{n: v[i : i + self.max_batch] for n, v in inputs.items()} for i in starts]
        parts = [self._run(piece) for piece in pieces]
        for part, piece in zip(parts, pieces, strict=True):
            _require_rows(part, piece)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._lock:
            self._check_open()
            outputs = self._runner.run(inputs)
        return {name: _on_cpu(value) for name, value in outputs.items()}

    def _check_open(self) -> None:
        if self._runner is None:
            raise UsageError("this Predictor is closed", hint="Open the artifact again with Predictor.load")

    def close(self) -> None:
        """Free the model; calls after this raise `UsageError`."""
        with self._lock:
            if self._runner is not None:
                self._runner.close()
                self._runner = None  # `_run_arrays` is not called any more


class TensorInputs(CheckedRunner):
    """The calls of an artifact."""

    def __init__(self, folder: Path, manifest: store.Manifest, runner: Any, notes: list[Finding]) -> None:
        super().__init__(
            manifest.inputs, manifest.outputs, manifest.sizes, runner, manifest.joins or "padded"
        )
        self.path, self.manifest, self.notes = folder, manifest, notes
        self.name, self.version, self.task = manifest.name, manifest.version, manifest.task


def _on_cpu(value: Tensor) -> Tensor:
    """Move an output to the CPU, detached from autograd."""
    return value.detach().cpu() if value.requires_grad or value.device.type != "cpu" else value


def _require_rows(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Raise `InferError` unless each row of the inputs has one row in every output."""
    rows = len(next(iter(inputs.values())))
    for name, value in outputs.items():
        if not value.dim() or len(value) != rows:
            raise InferError(
                f"expected {rows} rows of output {name!r}, the model returned {list(value.shape)}",
                hint="Run each request by itself",
            )
