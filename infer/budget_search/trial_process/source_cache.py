"""The source of one search, loaded and captured once: calibration, packed weights and float forms for its trials."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ... import compress, plugins
from ... import device as hardware
from ...compress import assign
from ...errors import InferError, NotUsableError, UsageError
from ...load import LoadedModel
from ...plan import Plan
from ...reporter import Reporter
from ...run import onnx_form, stages
from ...run.float_graph import Original
from ...run.float_reference import FloatReferences
from ...run.resolve_plan import Resolved, resolve_cache
from ...run.trial import Trial
from ...run.trial_timing import Patience
from ...spec import Finding

PACKED_SHARE = 0.1  # of the free memory, that packed weights may hold for trials to come
FLOAT_SHARE = 0.03  # that single float layers of one backend may hold
SECOND_SHARE = 0.05  # that the weights of a source may take to be kept beside another


class SourceFailure(Exception):
    """Error of the source, its data or an option, which every trial would meet; `error` is that error."""

    def __init__(self, error: InferError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class PreparedSource:
    """A source loaded and captured in one way (`key`), and what its trials share."""

    key: tuple[object, ...]
    original: Original
    floats: FloatReferences
    float_layers: assign.SharedFloatLayers
    findings: list[Finding]
    stats: dict[str, Mapping[str, compress.Stats]] = field(default_factory=dict)  # by way of calibration
    packings: dict[str, compress.PackingCache] = field(default_factory=dict)  # the same
    calls: assign.CallCounter = field(default_factory=assign.CallCounter)
    last_model: stages.LastModel = field(default_factory=stages.LastModel)
    patience: Patience = field(default_factory=Patience)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights in memory; infinite where they are streamed or not those of a torch module."""
        if not self.original.is_in_memory:
            return math.inf
        return sum(value.nbytes for value in self.original.module.state_dict().values())

    def assignment(self, plan: Plan, reporter: Reporter) -> assign.Assignment:
        """Make the assignment of a trial, with calibration statistics, packed weights and open float layers of
        earlier trials of its kind.

        Recovery trains packed weights in place, so a trial with `--recover` packs its own.
        """
        known = self.stats.get(plan.calibrate) if plan.quant != "none" else None
        made = stages.make_assignment(plan, self.original, reporter, known)
        if made.stats is not None:
            self.stats[plan.calibrate] = made.stats
        made.float_layers, made.calls = self.float_layers, self.calls
        if not plan.recover:
            room = int(PACKED_SHARE * hardware.memory_available())
            made.packing_cache = self.packings.setdefault(plan.calibrate, compress.PackingCache(room))
        return made


class SourceCache:
    """Keeps the last prepared source, the one before where it is small, and in the folder `work` the float forms that
    trials lowered.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._prepared: list[PreparedSource] = []  # the last one at the end

    @property
    def last(self) -> PreparedSource | None:
        """The source as the last trial of this process needed it; None before the first one."""
        return self._prepared[-1] if self._prepared else None

    def prepare(self, run: Resolved, reporter: Reporter) -> tuple[PreparedSource, Resolved]:
        """Load and capture the source, unless one of the last trials needed it in the same way.

        Raises `SourceFailure` for a source that can't be loaded or captured.
        """
        for known in self._prepared:
            chosen = resolve_cache(run, known.original.loaded.task)
            if known.key == _key(chosen.plan, known.original.loaded):
                self._prepared.sort(key=lambda one: one is known)
                return known, chosen
        self._make_room()
        fresh = reporter.attempt()
        try:
            loaded, chosen = stages.load(run, fresh, calibrates=True)
            original = stages.capture_original(chosen.plan, loaded, fresh)
        except (UsageError, NotUsableError) as error:
            raise SourceFailure(error) from error
        key = _key(chosen.plan, original.loaded)
        name = "-".join(map(str, key))
        shutil.rmtree(self._work / f"float-{name}", ignore_errors=True)
        floats = stages.float_forms(original, self._work / f"float-{name}")
        for other in self._prepared:
            floats.share_outputs(other.floats)
            if original.folded == other.original.folded:
                floats.share_seconds(other.floats)
        room = int(FLOAT_SHARE * hardware.memory_available())
        layers = assign.SharedFloatLayers(room, self._work)
        self._prepared.append(PreparedSource(key, original, floats, layers, fresh.findings))
        return self._prepared[-1], chosen

    def _make_room(self) -> None:
        """Forget all prepared sources but the last one, and that too unless a second one takes little memory."""
        small = SECOND_SHARE * hardware.memory_available()
        while self._prepared and (len(self._prepared) > 1 or self._prepared[0].weight_bytes > small):
            self._prepared.pop(0).float_layers.close()

    def keep_float_form(self, trial: Trial, plan: Plan) -> None:
        """Keep what a trial of the unchanged model lowered, as the form that others are timed against."""
        place = self._float_form(trial.backend, plan)
        if not place.exists():
            shutil.copytree(
                trial.folder, place, copy_function=lambda old, new: os.link(os.path.realpath(old), new)
            )

    def open_float_forms(self, prepared: PreparedSource, plan: Plan, rivals: Collection[str]) -> None:
        """Open the float forms of `rivals` that earlier trials lowered, in this process or one that died."""
        shape = prepared.original.mode.shape
        if plan.quant == "none" and plan.dtype == "float32":
            return
        for backend in rivals:
            place = self._float_form(backend, plan)
            own = shape if plugins.get("backends", backend).STEPS else None
            if prepared.original.is_in_memory and place.exists():
                prepared.floats.adopt(backend, place, own, plan.device)

    def _float_form(self, backend: str, plan: Plan) -> Path:
        return self._work / "float-forms" / f"{backend}-{plan.kv_dtype}"


def _key(plan: Plan, loaded: LoadedModel) -> tuple[object, ...]:
    """Return what decides how a source is loaded and captured: batch norms are folded for formats only."""
    return plan.kv_dtype, "packed" if plan.quant != "none" else "float", onnx_form.form(plan, loaded)
