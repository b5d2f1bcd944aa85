"""Quantize a Hugging Face folder by auto-round or GPTQModel; started by `peer_quantization.py` in their environment.

    PYTHON peer_quantizer.py auto-round|GPTQModel FOLDER ROWS.npz OUTPUT --bits 4 --group 64
    PYTHON peer_quantizer.py versions

ROWS.npz holds the calibration rows, input_ids and attention_mask. OUTPUT gets weights.safetensors, the decoded weights
of the quantized layers by transformers' names, and stored.json, the bytes that each takes in the package's own files.
Imports nothing of this repository. All settings but the bits, the group and the rows are the package's defaults.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = {"auto-round": "auto-round", "GPTQModel": "gptqmodel"}
BATCH = 8


def auto_round(folder: Path, rows: list[dict[str, Any]], bits: int, group: int, work: Path) -> dict[str, Any]:
    """Tune the rounding by signed gradients (200 steps a block); return the decoded weights."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    tuned = AutoRound(
        _model(folder), AutoTokenizer.from_pretrained(folder), bits=bits, group_size=group,
        dataset=[{name: torch.tensor([ids]) for name, ids in row.items()} for row in rows],
        seqlen=len(rows[0]["input_ids"]), nsamples=len(rows), batch_size=BATCH, device_map="cpu",
        enable_torch_compile=False,
    )  # fmt: skip
    model, _ = tuned.quantize()
    decoded = {
        f"{name}.weight": layer.weight.detach().clone().contiguous()
        for name, layer in model.named_modules()
        if getattr(layer, "bits", 16) == bits and hasattr(layer, "weight")
    }
    tuned.save_quantized(str(work), format="auto_round")
    return decoded


def gptq(folder: Path, rows: list[dict[str, Any]], bits: int, group: int, work: Path) -> dict[str, Any]:
    """Quantize by GPTQ; return the decoded weights."""
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(folder), QuantizeConfig(bits=bits, group_size=group, device="cpu"))
    model.quantize(rows, batch_size=BATCH)
    model.save(str(work))
    decoded = {}
    for name, layer in model.model.named_modules():
        if hasattr(layer, "dequantize_weight"):
            decoded[f"{name}.weight"] = layer.dequantize_weight().detach().t().clone().contiguous()
    return decoded


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    causal = any(name.endswith("ForCausalLM") for name in config.get("architectures") or [])
    kind = AutoModelForCausalLM if causal else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def stored_bytes(work: Path, names: list[str]) -> dict[str, int]:
    """Return the bytes that each quantized weight takes in the saved files."""
    from safetensors import safe_open

    found = dict.fromkeys(names, 0)
    for path in work.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                owner = key.rpartition(".")[0] + ".weight"
                if owner in found and not key.endswith(".bias"):
                    found[owner] += file.get_tensor(key).nbytes
    return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    if sys.argv[1:] == ["versions"]:
        print(json.dumps(versions()))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    given = parser.parse_args()
    import numpy as np
    from safetensors.torch import save_file

    arrays = dict(np.load(given.rows))
    count = len(arrays["input_ids"])
    arrays.setdefault("attention_mask", np.ones_like(arrays["input_ids"]))
    rows = [{name: values[i].tolist() for name, values in arrays.items()} for i in range(count)]
    quantize = auto_round if given.package == "auto-round" else gptq
    with tempfile.TemporaryDirectory() as work:
        weights = quantize(given.folder, rows, given.bits, given.group, Path(work))
        if not weights:
            raise SystemExit(f"{given.package} quantized no layer of {given.folder}")
        stored = stored_bytes(Path(work), list(weights))
    given.output.mkdir(parents=True)
    save_file(weights, given.output / "weights.safetensors")
    (given.output / "stored.json").write_text(json.dumps(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
