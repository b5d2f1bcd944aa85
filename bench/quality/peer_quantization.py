"""Quantization by auto-round and GPTQModel, in an environment of their own: `peer_quantizer.py` runs there.

Both quantize the linear layers of the blocks; embedding, head and norms stay in the float16 of the checkpoint.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from bench.quality.reference_models import ReferenceModel

CHILD = Path(__file__).with_name("peer_quantizer.py")
FLOAT_BYTES = 2
SECONDS = 3600  # of one quantization


@dataclass(frozen=True)
class PeerSetting:
    """A package with its bits and the columns of a group."""

    package: str
    bits: int
    group: int

    @property
    def name(self) -> str:
        return f"W{self.bits} g{self.group}"


SETTINGS = tuple(
    PeerSetting(package, bits, group)
    for package in ("auto-round", "GPTQModel")
    for bits, group in ((2, 32), (3, 64), (3, 32), (4, 64), (4, 32))
)


def versions(python: Path | None) -> dict[str, str]:
    """Return the versions of the packages in their environment, as far as they are there."""
    if python is None:
        return {}
    ran = subprocess.run([python, CHILD, "versions"], capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(ran.stdout) if ran.returncode == 0 else {}
    return found


def contender(
    model: ReferenceModel, setting: PeerSetting, scope: str, python: Path | None, work: Path
) -> tuple[dict[str, Tensor], int]:
    """Quantize a model by a package; return its decoded weights and the bytes that `scope` counts.

    Raises `RuntimeError` with the last line of what the package said where it fails.
    """
    if python is None:
        raise RuntimeError("not measured: --peers names no Python with this package")
    output = work / f"{model.name}-{setting.package}-{setting.bits}-{setting.group}"
    if not output.exists():
        _run(model, setting, python, work, output)
    weights = load_file(output / "weights.safetensors")
    stored: dict[str, int] = json.loads((output / "stored.json").read_text())
    size = sum(stored.get(name, own.numel() * FLOAT_BYTES) for name, own in model.matrices(scope).items())
    return {name: value.float() for name, value in weights.items()}, size


def _run(model: ReferenceModel, setting: PeerSetting, python: Path, work: Path, output: Path) -> None:
    rows = work / f"{model.name}-calibration.npz"
    if not rows.exists():
        np.savez(rows, **{name: value.numpy() for name, value in model.calibration.items()})
    command = [
        python, CHILD, setting.package, model.folder, rows, output,
        f"--bits={setting.bits}", f"--group={setting.group}",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if ran.returncode or not output.exists():
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"ended with exit code {ran.returncode}")
