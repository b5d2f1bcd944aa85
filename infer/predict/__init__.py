"""Predictor: an opened artifact. Numpy in, numpy out; torch in, torch out; safe to call from many threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from .. import artifact, fidelity, golden
from .. import device as hardware
from ..errors import ArtifactError, InferError
from ..generate import Windows, cuda_graphs
from ..generate.language import parse_size
from ..manifest import read_report
from ..spec import Finding
from ..thresholds import LIMITS, precision
from .generation import Generation, Options
from .opening import backend_of, blaming, differences, generation_shape, lower_again
from .tensors import Array

__all__ = ["Array", "Options", "Predictor", "generation_shape"]

MAX_WARM_BYTES = 1 << 30  # of inputs: a manifest may promise a batch that no machine could hold
QUICK = 0.25  # seconds; what takes longer is warmed up once


class Predictor(Generation):
    """`with Predictor.load("model.infer") as p: p.predict({"image": array})`.

    `inputs`, `outputs`: tuples of `TensorSpec`; `sizes`: symbolic size → (smallest, largest); `report`: the dict of
    report.json; `notes`: what was noticed while opening (lowered again for this machine, …); `phases`: seconds that
    parts of `load` took.
    """

    phases: dict[str, float]

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        trust_code: bool = False,
        kv_memory: str | int | None = None,
        max_tokens_per_step: int | None = None,
        speculation: bool = True,
        batch_invariant: bool = False,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> Self:
        """Verify hashes and trust, open (lowering again where the machine differs), run the golden inputs.

        Of a language model, `kv_memory` is for its KV cache ("2GiB" or bytes; default: a share of what is free), and
        `max_tokens_per_step` bounds how long others wait for a prompt that is read (default 512).
        With `speculation` it drafts text that repeats itself and checks several tokens in one step, where that pays.
        `batch_invariant`: what a request gets depends on no other that runs, to the last bit; slower, for nothing is
        batched or drafted.
        `adapters`: LoRA adapters of PEFT's format to load, folders by name (see `Language.load_adapter`).

        Raises `ArtifactError` (damaged, foreign, wrong numbers), `UnsafeSourceError` (code nobody trusts),
        `NotUsableError` (its backend can't run here).
        """
        parse_size(kv_memory, "kv_memory")
        folder, began = Path(path), time.perf_counter()
        manifest = artifact.read_manifest(folder)
        artifact.verify(folder, manifest)
        phases = {"hash": time.perf_counter() - began}
        backend = backend_of(manifest, folder)
        limited = hardware.fit_threads(threads)
        place = hardware.resolve(manifest.device if device == "auto" else device).value
        hardware.use_tf32(manifest.plan.dtype, place)
        if backend.EXECUTES_CODE and not trust_code:
            artifact.require_trust(folder, f"backend {manifest.backend}")
        notes: list[Finding] = [limited] if limited else []
        differs = differences(manifest.target, backend.target(place))
        with blaming(folder, f"{manifest.backend} can't open it"):
            opened = (
                lower_again(folder, manifest, backend, place, differs, trust_code, notes)
                if differs
                else folder
            )
            runner = backend.open(opened, place)
            if (shape := generation_shape(manifest)) is not None:
                runner = Windows(cuda_graphs.wrap(runner, place), shape, place)
            predictor = cls(folder, manifest, runner, notes)
        predictor.kv_memory, predictor.max_tokens_per_step = kv_memory, max_tokens_per_step
        predictor.speculation, predictor.batch_invariant = speculation, batch_invariant
        predictor.phases = phases
        tested = time.perf_counter()
        try:
            with blaming(folder, "the self-test failed"):
                predictor.self_test(exact=not differs)
            for name, adapter in (adapters or {}).items():
                predictor.language.load_adapter(name, adapter)
        except InferError:
            predictor.close()
            raise
        phases["self-test"] = time.perf_counter() - tested
        return predictor

    @property
    def report(self) -> dict[str, Any]:
        return read_report(self.path)

    def warmup(self) -> list[tuple[int, float]]:
        """Run the golden inputs at batch 1 and at the largest batch, so that the first request pays for nothing.

        Of each: elements of the largest input, and seconds, of a second run where the first was quick.
        """
        kept, taken = golden.read_inputs(self.path, self.inputs), list[tuple[int, float]]()
        row_bytes = sum(v.nbytes // len(v) if v.dim() else v.nbytes for v in kept.values())
        for rows in sorted({1, min(self.max_batch, max(MAX_WARM_BYTES // row_bytes, 1))}):
            inputs = {spec.name: spec.with_rows(kept[spec.name], rows) for spec in self.inputs}
            seconds = self._seconds(inputs)
            if seconds < QUICK:
                seconds = min(seconds, self._seconds(inputs))
            taken.append((max(tensor.numel() for tensor in inputs.values()), seconds))
        return taken

    def _seconds(self, inputs: dict[str, torch.Tensor]) -> float:
        began = time.perf_counter()
        self._run(inputs)
        return time.perf_counter() - began

    def self_test(self, *, exact: bool = True) -> None:
        """Golden inputs through the runner: equal to what it gave when it was made, and near the float original."""
        outputs = self._run(golden.read_inputs(self.path, self.inputs))
        made = golden.read_outputs(self.path, outputs)
        plan = self.manifest.plan
        limits = LIMITS["float32"] if exact else LIMITS[precision(plan)]
        reason = fidelity.judge(fidelity.compare(made, outputs, task="tensors"), limits, None)
        if reason:
            raise ArtifactError(
                f"the self-test failed: {reason}",
                where=str(self.path),
                hint="This machine computes other numbers than the one that made it; make the artifact again here",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
