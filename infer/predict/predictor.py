"""Predictor: an opened artifact. Numpy in, numpy out; torch in, torch out; safe to call from many threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from .. import device as hardware
from .. import fidelity, rows
from ..artifact import golden, store
from ..artifact.artifact_of_source import artifact_of
from ..artifact.manifest import read_report, target_of
from ..errors import ArtifactError, InferError
from ..fidelity.thresholds import LIMITS, precision
from ..graph import encoder_decoder_graphs
from ..llm.llm import parse_size
from ..llm.step import cuda_graphs
from ..llm.step.encoder_decoder.encoder_decoder_runner import sequence_runner
from ..plan import Plan
from ..spec import Finding, work_of_rows
from .open_artifact import as_artifact_error, backend_of, differences, generation_shape, lower_again
from .text_generation import TextGeneration

MAX_WARM_BYTES = 1 << 30  # of inputs: a manifest may promise a batch that no machine could hold
QUICK = 0.25  # seconds; what takes longer is warmed up once


class Predictor(TextGeneration):
    """An opened artifact, safe to call from many threads.

        with Predictor.load("model.infer") as predictor:
            outputs = predictor.predict({"image": array})

    Attributes:

    - `inputs`, `outputs`: tuples of `TensorSpec`.
    - `sizes`: symbolic size → (smallest, largest); `max_batch`: the largest batch of one run.
    - `joins`: which requests may share a batch: "padded" to one length, of "equal" lengths, or "none", as rows
      depend on each other.
    - `name`, `version`, `task`: of the manifest; `manifest`: all of it; `path`: the folder.
    - `notes`: findings made while opening, such as that it was lowered again for this machine.
    - `phases`: seconds of each part of `load`.
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
        draft: str | Path | None = None,
        batch_invariant: bool = False,
        adapters: Mapping[str, str | Path] | None = None,
        tool_form: str = "auto",
        reasoning_form: str = "auto",
    ) -> Self:
        """Open an artifact, or that of a source: a name on the Hub, a file or a Hugging Face folder, which is optimized
        by the plan's defaults at its first use, in a process of its own, and kept in the cache of the user.

        To open it is to verify hashes and trust, lower again where this machine differs, run the golden inputs.

        - `device`: auto (the one it was made for), cpu, cuda or cuda:N. `threads`: CPU threads, by default those that
          it was made with (`--threads`), else all.
        - `trust_code`: open a backend's compiled code that was not made by this user.

        Of a language model:

        - `kv_memory`: memory of the KV cache, "2GiB" or bytes; by default a share of what is free.
        - `max_tokens_per_step`: tokens of one step, by default 512; fewer shorten the wait behind a long prompt.
        - `speculation`: draft text that repeats itself and check several tokens in one step, where that is faster.
        - `draft`: a smaller model of the same vocabulary, named as `path` is, that drafts in place of that; its memory
          comes out of `kv_memory`. Outputs stay those without drafts.
        - `batch_invariant`: bit-identical answers whatever else runs; slower, because nothing is batched or drafted.
        - `adapters`: folders of LoRA adapters in PEFT's format, by name.
        - `tool_form`, `reasoning_form`: how it writes calls and thoughts, by default as its chat template shows.

        Raises `ArtifactError` (damaged, foreign, wrong numbers), `UnsafeSourceError` (code without trust),
        `NotUsableError` (its backend can't run here) and `ResourceError` (memory).
        """
        parse_size(kv_memory, "kv_memory")
        folder, began = artifact_of(Plan(source=str(path), trust_code=trust_code)), time.perf_counter()
        manifest = store.read_manifest(folder)
        store.verify(folder, manifest)
        phases = {"hash": time.perf_counter() - began}
        backend = backend_of(manifest, folder)
        limited = hardware.fit_threads(threads or manifest.plan.threads)
        place = hardware.resolve(manifest.device if device == "auto" else device).value
        hardware.use_tf32(manifest.plan.dtype, place)
        if backend.EXECUTES_CODE and not trust_code:
            store.require_trust(folder, f"backend {manifest.backend}")
        notes: list[Finding] = [limited] if limited else []
        differs = differences(manifest.target, target_of(backend, manifest.backend, place))
        with as_artifact_error(folder, f"{manifest.backend} can't open it"):
            opened = (
                lower_again(folder, manifest, backend, place, differs, trust_code, notes)
                if differs
                else folder
            )
            predictor = cls(folder, manifest, open_runner(backend, opened, manifest, place), notes)
        predictor.kv_memory, predictor.max_tokens_per_step = kv_memory, max_tokens_per_step
        predictor.speculation, predictor.batch_invariant = speculation, batch_invariant
        predictor.tool_form, predictor.reasoning_form = tool_form, reasoning_form
        predictor.phases = phases
        if draft is not None:
            try:
                predictor.use_draft(cls.load(draft, device=device, threads=threads, trust_code=trust_code))
            except InferError:
                predictor.close()
                raise
        tested = time.perf_counter()
        made_on = manifest.plan.device.partition(":")[0]  # of what was built ahead of time not its GPU
        same_kind = place.partition(":")[0] == made_on
        predictor._complete(exact=not differs and same_kind, adapters=adapters or {})
        phases["self-test"] = time.perf_counter() - tested
        return predictor

    def _complete(self, *, exact: bool, adapters: Mapping[str, str | Path]) -> None:
        """Run the self-test and load the adapters; close the predictor where one fails."""
        try:
            with as_artifact_error(self.path, "the self-test failed"):
                self.self_test(exact=exact)
            for name, adapter in adapters.items():
                self.language_model.load_adapter(name, adapter)
        except InferError:
            self.close()
            raise

    @property
    def report(self) -> dict[str, Any]:
        """The content of report.json: what was tried, chosen, measured and refused."""
        return read_report(self.path)

    def warmup(self) -> list[tuple[float, float]]:
        """Run the golden inputs at batch 1 and at the largest batch, so that no request pays for a first run.

        Returns (work, seconds) of each run. Work is the elements of the largest input, or `spec.work_of_rows` of a
        model that computes no padding.
        """
        kept, taken = golden.read_inputs(self.path, self.inputs), list[tuple[float, float]]()
        row_bytes = sum(v.nbytes for v in kept.values()) // rows.count(self.inputs, kept)
        for count in sorted({1, min(self.max_batch, max(MAX_WARM_BYTES // row_bytes, 1))}):
            inputs = {spec.name: spec.with_rows(kept[spec.name], count) for spec in self.inputs}
            seconds = self._seconds(inputs)
            if seconds < QUICK:
                seconds = min(seconds, self._seconds(inputs))
            taken.append((self._work(inputs), seconds))
        return taken

    def _work(self, inputs: Mapping[str, torch.Tensor]) -> float:
        mask = inputs.get("attention_mask")
        if self.attention_length is None or mask is None:
            return max(tensor.numel() for tensor in inputs.values())
        return work_of_rows(mask.sum(dim=1).numpy(), self.attention_length)

    def _seconds(self, inputs: dict[str, torch.Tensor]) -> float:
        began = time.perf_counter()
        self._run(inputs)
        return time.perf_counter() - began

    def self_test(self, *, exact: bool = True) -> None:
        """Run the golden inputs and compare with the stored outputs; raise `ArtifactError` where they differ.

        `exact` allows rounding only; otherwise the limits of the artifact's precision class hold.
        """
        outputs = self._run(golden.read_inputs(self.path, self.inputs))
        made = golden.read_outputs(self.path, outputs)
        for name in [
            name for name, value in made.items() if not value.numel() and value.shape == outputs[name].shape
        ]:
            del made[name], outputs[name]  # no detection in these rows: nothing to compare, nothing wrong
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


def open_runner(backend: Any, folder: Path, manifest: store.Manifest, device: str) -> Any:
    """Open the compiled graphs of `folder`; those of a language model as a runner of whole sequences."""
    runner = encoder_decoder_graphs.open_runner(backend, folder, device)
    if (shape := generation_shape(manifest)) is None:
        return runner
    return sequence_runner(cuda_graphs.wrap(runner, device), shape, device)
