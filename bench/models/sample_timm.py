"""Architectures of timm that nobody chose: random weights saved as a checkpoint, opened, compared, shrunk and compiled.

Columns: `timm:NAME` opens with its weights (and after how many seconds); the outputs equal those of timm at float;
`--quant int8` passes its gate. For a few of them the backends inductor and ort lower the float model and pass theirs.
"""

from __future__ import annotations

import importlib
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.models.checks import NONE, WORKS, Cell, Cells, attempt

TITLE = "Models of timm"
COLUMNS = ("opens", "equals the original", "int8", "compiled")
ENTRIES: dict[str, str] = {}  # rows are named by the sample
MOST_PARAMETERS = 15e6
COMPILED = {"inductor": 7, "ort": 5}  # one of so many architectures is lowered by this backend


def import_timm() -> Any:
    """Return timm; torchvision's two operators are declared where its compiled library does not load."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    return importlib.import_module("timm")


_KEPT: list[Any] = []


def draw(seed: int, count: int) -> list[str]:
    """Draw architectures of `count` distinct families (modules of timm), each of at most MOST_PARAMETERS."""
    timm, chance = import_timm(), random.Random(seed)
    families = sorted(timm.list_modules())
    chance.shuffle(families)
    found: list[str] = []
    for family in families:
        names = sorted(timm.list_models(module=family))
        chance.shuffle(names)
        if (name := next((one for one in names if _is_small(timm, one)), None)) is not None:
            found.append(name)
        if len(found) == count:
            break
    return found


def _is_small(timm: Any, name: str) -> bool:
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name).parameters()) <= MOST_PARAMETERS
    except (NotImplementedError, RuntimeError):  # computes with its weights while it is built
        return sum(p.numel() for p in timm.create_model(name).parameters()) <= MOST_PARAMETERS


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row, the name of an architecture."""
    timm, weights = import_timm(), folder / "weights.safetensors"
    torch.manual_seed(0)
    try:
        model = trained(timm.create_model(name))
        from safetensors.torch import save_model

        save_model(model, str(weights))
    except Exception as error:  # noqa: BLE001 - no word about `infer`
        yield "opens", Cell(NONE, f"not made: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return
    begun, artifact = time.monotonic(), folder / "float.infer"
    made = attempt(lambda: _optimize(name, weights, artifact))
    yield "opens", Cell(made.outcome, f"{made.why} [{time.monotonic() - begun:.0f} s]".strip())
    if made.outcome != WORKS:
        return
    yield "equals the original", attempt(lambda: _equals(model, artifact))
    yield "int8", attempt(lambda: _optimize(name, weights, folder / "int8.infer", quant="int8"))
    for backend, one_of in COMPILED.items():
        if sum(map(ord, name)) % one_of == 0:
            lowered = folder / f"{backend}.infer"
            cell = attempt(lambda b=backend, a=lowered: _optimize(name, weights, a, backend=b))  # type: ignore[misc]
            yield "compiled", Cell(cell.outcome, f"{backend}: {cell.why}" if cell.why else backend)
            return


def trained(model: nn.Module) -> nn.Module:
    """Move what starts at 0 or 1 (scales of layers, biases, running statistics) off it, so that every layer counts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2 and tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
        model.train()  # statistics of batch normalization from one batch of noise
        cfg: Any = model.pretrained_cfg
        model(torch.randn((4, *cfg["input_size"]), generator=generator))
    return model.eval()


def _optimize(
    name: str, weights: Path, artifact: Path, *, quant: str = "none", backend: str = "eager"
) -> str:
    from infer import Plan, optimize

    source = {"source": f"timm:{name}", "weights": str(weights), "quant": quant, "backend": backend}
    optimize(Plan(**source, data="random", batches=(), allow_slower=True), artifact)  # type: ignore[arg-type]
    return ""


def _equals(model: nn.Module, artifact: Path) -> None:
    from infer import Predictor

    with Predictor.load(artifact) as predictor, torch.no_grad():
        spec = predictor.inputs[0]
        shape = [2, *(size if isinstance(size, int) else 224 for size in spec.shape[1:])]
        images = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        got = predictor.predict({spec.name: images})
        expected = model(torch.from_numpy(images)).numpy()
        (value,) = got.values()
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-3 * float(np.abs(expected).max()))
