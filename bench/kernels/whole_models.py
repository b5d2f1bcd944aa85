"""Speed bars of whole int8 models: ours through `optimize` and `Predictor`, against ONNX Runtime, OpenVINO, torch.

`prepare` builds the models, which takes minutes, and caches them in .work/kernels: the rivals' by library versions and
conversion scripts, ours by the sources of `infer`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from bench.kernels import whole_models_rivals
from bench.kernels.linear_infer import relative
from bench.kernels.whole_models_rivals import Call, Inputs
from bench.kernels.whole_models_sources import BERT, MINILM, Source, named, resnet
from bench.shared import child_process
from bench.shared.bars import Bar
from bench.shared.child_process import EngineCrashed
from bench.shared.repository import ROOT
from bench.shared.rivals import Rivals
from bench.shared.timing import Side
from infer import Predictor
from infer import device as hardware
from infer.run import stages

WORK = ROOT / ".work" / "kernels"
ORT, OPENVINO, FLOAT = "ORT int8", "OpenVINO int8", "torch float32"
BATCH, TOKENS = "batch", "tokens"
SUFFIXES = {".py", ".cpp", ".h"}  # of sources that change our artifacts


@dataclass(frozen=True)
class BenchmarkCase:
    """One whole model at one size, and the speed-up required against each rival."""

    source: Source
    rows: int
    length: int  # tokens; 0 for images
    faster: dict[str, float]
    error: float | None  # the largest share of ORT's error

    @property
    def name(self) -> str:
        shape = f"{self.rows}×{self.length}" if self.length else f"{self.rows}×3×224×224"
        return f"{self.source.name} {shape}"


def cases() -> Iterator[BenchmarkCase]:
    """Yield models, sizes and factors; a rival without a factor must not be faster."""
    faster = {ORT: 1.3, OPENVINO: 1.0, FLOAT: 1.0}
    for source, rows, length in ((MINILM, 8, 64), (MINILM, 1, 16), (BERT, 1, 128)):
        yield BenchmarkCase(source, rows, length, faster, 0.2)
    yield BenchmarkCase(resnet(), 1, 0, {ORT: 1.0, OPENVINO: 1.0}, None)


def prepare(case: BenchmarkCase) -> dict[str, Path | str]:
    """Return for each engine the file to open, or the reason why it is absent."""
    source, made = case.source, {}
    for rival, engine in ((ORT, "ORT"), (OPENVINO, "OpenVINO")):
        made[rival] = whole_models_rivals.missing(engine) or _made_apart(source, engine)
    made["ours"] = _kept(f"{source.name}-ours", _sources_digest(), lambda folder: _ours(source, folder))
    return made


def measure(case: BenchmarkCase) -> list[Bar]:
    """Compare each engine with float on the inputs that are then timed, every rival in a process of its own."""
    made = prepare(case)
    inputs = case.source.inputs(case.rows, case.length)
    given = {name: value.numpy() for name, value in inputs.items()}
    with torch.no_grad():
        exact = case.source.module("sdpa")(**inputs)
    absent = {name: found for name, found in made.items() if isinstance(found, str)}
    call = _open_ours(case.source, Path(made["ours"]))
    ours = Side("ours", lambda: call(inputs), lambda: call(inputs))
    with Rivals() as rivals:
        for name in (FLOAT, ORT, OPENVINO):
            if name not in absent:
                rivals.start(name, rival_sides, case.source.name, name, made.get(name), given)
        products = {"ours": ours.output(), **rivals.outputs()}
        errors = {name: relative(product, exact) for name, product in products.items()}
        seconds = rivals.interleaved([ours])
    absent |= rivals.crashed
    details = {"seconds": seconds, "relative_error": errors, "crashed": rivals.crashed}
    bars = []
    for rival, need in case.faster.items():
        bar = Bar(work=case.name, rival=rival, need=need, why=absent.get(rival, ""), details=details)
        if rival in seconds:
            ours, theirs = seconds["ours"], seconds[rival]
            bar = msgspec.structs.replace(bar, got=theirs / ours, ours=ours, theirs=theirs)
        bars.append(bar)
    if case.error is not None:
        bar = Bar(work=case.name, rival=ORT, need=case.error, unit="of its error", below=True)
        if ORT in errors and ORT not in absent:
            ours, theirs = errors["ours"], errors[ORT]
            bar = msgspec.structs.replace(bar, got=ours / theirs, ours=ours, theirs=theirs)
        bars.append(msgspec.structs.replace(bar, why=absent.get(ORT, ""), details=details))
    return bars


def rival_sides(source: str, rival: str, path: Path | None, given: dict[str, np.ndarray]) -> list[Side]:
    """Return a rival's side in this process: the file at `path`, or the float module of the source of that name."""
    inputs = {name: torch.from_numpy(value) for name, value in given.items()}
    call = _open_float(named(source)) if path is None else _OPENERS[rival](path)
    return [Side(rival, lambda: call(inputs), lambda: call(inputs))]


def _open_float(source: Source) -> Call:
    module = source.module("sdpa")

    def call(inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return module(**inputs)

    return call


_OPENERS: dict[str, Callable[[Path], Call]] = {
    ORT: whole_models_rivals.open_ort,
    OPENVINO: whole_models_rivals.open_openvino,
}


def _made_apart(source: Source, engine: str) -> Path | str:
    """Return the file of a rival, made the first time in a process of its own, or how that process crashed."""
    try:
        return _kept(
            f"{source.name}-{engine}",
            _versions(),
            lambda folder: child_process.apart(make_rival, source.name, engine, folder),
        )
    except EngineCrashed as error:
        return str(error)


def make_rival(source_name: str, engine: str, folder: Path) -> Path:
    """Export the float model of a source into `folder` and quantize it by the rival's own means."""
    source, path = named(source_name), folder / "float.onnx"
    inputs = source.inputs(2, 64 if source.heads else 0)
    axes = {0: BATCH, 1: TOKENS} if source.heads else {0: BATCH}
    sizes = {**dict.fromkeys(inputs, axes), "output": {0: BATCH}}
    whole_models_rivals.make_onnx(source.module("eager"), inputs, sizes, path)
    if engine == "OpenVINO":
        batches = source.calibration()
        return whole_models_rivals.make_openvino(path, batches, is_transformer=bool(source.heads))
    if source.heads:
        return whole_models_rivals.make_ort_dynamic(path, source.heads, source.width)
    return whole_models_rivals.make_ort_static(path, source.calibration())


def _ours(source: Source, folder: Path) -> Path:
    """Optimize by inductor as a user would; its fidelity gate is on."""
    plan = source.plan(folder)
    quant = plan.quant if plan.quant != "none" else "int8"
    plan = plan.with_(quant=quant, backend="inductor", threads=torch.get_num_threads(), allow_slower=True)
    if not source.gated:  # the error is held against the rivals'
        plan = plan.with_(max_error=1.0)
    return stages.optimize(plan, folder / "model.infer").path


def _open_ours(source: Source, path: Path) -> Call:
    predictor = Predictor.load(path)
    return lambda inputs: predictor.predict(dict(inputs))[source.output]


def _kept(name: str, key: str, make: Callable[[Path], Path]) -> Path:
    """Return the path that `make` returned, cached in a folder of .work/kernels until `key` changes."""
    folder = WORK / f"{name}-{key}"
    note = folder / "made"
    if not note.exists():
        for old in WORK.glob(f"{name}-*"):
            shutil.rmtree(old)
        folder.mkdir(parents=True)
        note.write_text(str(make(folder).relative_to(folder)))
    return folder / note.read_text()


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("torch", "onnxruntime", "openvino", "nncf"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("absent")
    makers = (
        "kernels/whole_models_sources.py",
        "kernels/whole_models_rivals.py",
        "shared/bert_base.py",
        "shared/resnet50.py",
    )
    sources = [(ROOT / "bench" / name).read_bytes() for name in makers]
    return _short(repr((found, hardware.has_vnni())).encode() + b"".join(sources))


def _sources_digest() -> str:
    paths = sorted(
        p for folder in ("infer", "backends") for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES
    )
    return _short(b"".join(path.read_bytes() for path in paths))


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
