"""Tensor inputs: checked against the specs, split into batches that fit, and outputs joined."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import carried_state, rows
from ..artifact import store
from ..artifact.model_info import ModelInfo
from ..errors import InferError, InputError, UsageError
from ..spec import BATCH, Finding, Joins, TensorSpec, check_sizes
from .input_fast_path import FastInputs
from .session import Session

Array = np.ndarray | Tensor


class CheckedRunner:
    """Runner whose tensors are checked against the specs and split into batches, one call at a time.

    `attention_length`: see `spec.work_of_rows`; None where the runner computes padding. `joins`: which requests may
    share a batch; of a model whose rows depend on each other each request runs whole and alone. `states`: input →
    output of the call before; zeros where it is not given.
    """

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        sizes: Mapping[str, tuple[int, int]],
        runner: Any,
        joins: Joins = "padded",
        states: Mapping[str, str] | None = None,
        multiples: Mapping[str, int] | None = None,
    ) -> None:
        self.inputs, self.outputs, self.sizes, self.joins = inputs, outputs, sizes, joins
        self.states = dict(states or {})
        self.max_batch = self.sizes.get(BATCH, (1, 1))[1]
        self.multiples = dict(multiples or {})
        self._runner, self._lock = runner, threading.Lock()
        self._run_arrays: Any = getattr(runner, "run_arrays", None)
        self._fitting = FastInputs(inputs, sizes, self.multiples, as_arrays=self._run_arrays is not None)
        self.attention_length: int | None = getattr(runner, "attention_length", None)

    @property
    def _batched(self) -> bool:
        """True where requests may share a batch, and be split."""
        return self.joins != "none" and rows.are_joinable(self.inputs, self.outputs)

    @property
    def rows_together(self) -> int:
        """The most rows of different texts or images in one run: 1 where rows depend on each other."""
        return self.max_batch if self._batched else 1

    def predict(self, inputs: Any) -> Any:
        """Run one batch; more than `max_batch` rows run in several pieces, unless rows depend on each other.

        - A mapping of arrays by input name returns a mapping of arrays by output name.
        - A bare array, for a model of one input, returns a bare array where there is one output.
        - A list of such requests returns the list of their results, batched together where shapes allow.
        - Of an artifact with a task, a text, a pair of texts, a mapping with "question" and "context" or "choices", or
          "image" and "candidate_labels", the path or bytes of an image or sound file, a Pillow image, or a list of
          these, returns the answer, as `answer` does.

        Arrays are numpy or torch, of exactly the dtype and shape of `inputs`; results are of the same library, on the
        CPU. Raises `InputError` with the input, what was expected and what came, and `UsageError` after `close`.
        """
        # After a model has filled the caches each Python function costs microseconds: of a call of 160 they took 17.
        if type(inputs) is dict and (fitting := self._fitting.arrays(inputs)) is not None:
            arrays, as_torch = fitting
            with self._lock:
                if self._runner is None:
                    self._check_open()
                results: dict[str, np.ndarray] = self._run_arrays(arrays)
            if not as_torch:
                return results
            return {name: torch.from_numpy(array) for name, array in results.items()}
        return self._predict_any(inputs)

    def _predict_any(self, inputs: Any) -> Any:
        """Run inputs of every form that `predict` takes."""
        if type(inputs) is dict and (fitting := self._fitting.tensors(inputs)) is not None:
            outputs = self._run(fitting)
            if any(isinstance(value, Tensor) for value in inputs.values()):
                return outputs
            return {name: value.numpy() for name, value in outputs.items()}
        if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
            return (
                self._predict_rows(inputs) if self._stackable(inputs) else [self.predict(i) for i in inputs]
            )
        bare = not isinstance(inputs, Mapping)
        named = self.named(inputs)
        as_torch = any(isinstance(value, Tensor) for value in named.values())
        outputs = self._run_pieces(self._check(named))
        answer = {name: value if as_torch else value.numpy() for name, value in outputs.items()}
        return next(iter(answer.values())) if bare and len(answer) == 1 else answer

    def named(self, inputs: Any, known: Collection[str] = ()) -> Mapping[str, Array]:
        """Return inputs by name; a bare array is the only one apart from states and what is `known`."""
        if isinstance(inputs, Mapping):
            return inputs
        free = [spec.name for spec in self.inputs if spec.name not in self.states and spec.name not in known]
        if len(free) != 1:
            raise InputError(f"expected a mapping with {self._names()}, got {type(inputs).__name__}")
        return {free[0]: inputs}

    def run_checked(self, named: Mapping[str, Array]) -> dict[str, Tensor]:
        """Check inputs by name, run them, and return the outputs as tensors."""
        return self._run_pieces(self._check(named))

    def run_fitting(self, named: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the outputs of one call, on the CPU; None for inputs that the model does not take."""
        if self._fitting.arrays(named) is not None or self._fitting.tensors(named) is not None:
            outputs: dict[str, Tensor] = self.predict(named)
            return outputs
        try:
            checked = self._check(named)
        except InputError:
            return None
        return self._run_pieces(checked)

    def session(self, shared: Mapping[str, Any] | None = None) -> Session:
        """Begin a sequence: each call of the session gets the state that the one before returned, the first zeros.

        `shared`: inputs that are the same in every call, such as a sampling rate. Raises `UsageError` for a model
        that carries no state.
        """
        if not self.states:
            raise UsageError(
                "this model carries no state from call to call",
                hint="Call predict: a state is an input that is named like an output of its shape",
            )
        return Session(self, shared)

    def _stackable(self, requests: Sequence[Any]) -> bool:
        return self._batched and len(requests) > 1 and len({self._kind(r) for r in requests}) == 1

    def _kind(self, request: Any) -> tuple[Any, ...]:
        """Return what requests must have in common to be joined: shapes but for the rows, and what all rows share."""
        named = self.named(request)
        found: list[Any] = [tuple(sorted(named))]
        for spec in self.inputs:
            if spec.name in named:
                value, axis = named[spec.name], spec.batch_axis
                shape = np.shape(value)
                found.append(shape if axis is None else (*shape[:axis], *shape[axis + 1 :]))
                found += [np.asarray(value).tobytes()] if axis is None else []
        return tuple(found)

    def _predict_rows(self, requests: Sequence[Any]) -> list[Any]:
        checked = [self._check(self.named(request)) for request in requests]
        joined = rows.join(self.inputs, checked)
        outputs, answers, start = self._run_pieces(joined), [], 0
        self._require_rows(outputs, joined)
        for request, one in zip(requests, checked, strict=True):
            stop = start + rows.count(self.inputs, one)
            own = rows.cut(self.outputs, outputs, start, stop)
            as_torch = any(isinstance(value, Tensor) for value in self.named(request).values())
            answer = {name: value if as_torch else value.numpy() for name, value in own.items()}
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
            if spec.name not in named and spec.name in self.states:
                continue
            if spec.name not in named:
                raise InputError(f"missing input {spec}", where=where)
            value = named[spec.name]
            value = value if isinstance(value, np.ndarray | Tensor) else np.asarray(value)
            spec.check(value, where, bound)
            checked[spec.name] = (
                value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            )
        check_sizes(bound, self.sizes, splits=self._batched, joins=self.joins, multiples=self.multiples)
        return checked | carried_state.zeros(self.inputs, set(self.states) - set(checked), bound)

    def _run_pieces(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        count = rows.count(self.inputs, inputs) if self._batched else 1
        if count <= self.max_batch:
            return self._run(inputs)
        starts = range(0, count, self.max_batch)
        pieces = [rows.cut(self.inputs, inputs, i, i + self.max_batch) for i in starts]
        parts = [self._run(piece) for piece in pieces]
        for part, piece in zip(parts, pieces, strict=True):
            self._require_rows(part, piece)
        return rows.join(self.outputs, parts)

    def _require_rows(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Raise `InferError` unless each row of the inputs has one row in every output."""
        count = rows.count(self.inputs, inputs)
        for spec in self.outputs:
            value, axis = outputs[spec.name], spec.batch_axis
            if axis is None or value.dim() <= axis or value.shape[axis] != count:
                raise InferError(
                    f"expected {count} rows of output {spec.name!r}, the model returned {list(value.shape)}",
                    hint="Run each request by itself",
                )

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
            manifest.inputs,
            manifest.outputs,
            manifest.sizes,
            runner,
            manifest.joins,
            manifest.states,
            manifest.multiples,
        )
        self.path, self.manifest, self.notes = folder, manifest, notes
        self.name, self.version, self.task = manifest.name, manifest.version, manifest.task
        self.padding: dict[str, int] = {}  # of texts, where the artifact has a tokenizer

    @property
    def info(self) -> ModelInfo:
        """Facts of the model in one value, as tasks and the server read them."""
        return ModelInfo(
            name=self.name,
            version=self.version,
            task=self.task,
            inputs=self.inputs,
            outputs=self.outputs,
            sizes=dict(self.sizes),
            multiples=self.multiples,
            max_batch=self.max_batch,
            padding=self.padding,
            joins=self.joins,
            states=self.states,
            attention_length=self.attention_length,
            backend=self.manifest.backend,
            meta=self.manifest.meta,
            files=self.manifest.files,
            path=str(self.path),
        )


def _on_cpu(value: Tensor) -> Tensor:
    """Move an output to the CPU, detached from autograd."""
    return value.detach().cpu() if value.requires_grad or value.device.type != "cpu" else value
