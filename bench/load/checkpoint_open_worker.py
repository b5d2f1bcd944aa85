"""One measurement of `checkpoint_open.py`, for a process of its own: open or quantize the checkpoint."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PACKED = "packed.safetensors"


def write_pt(folder: Path) -> Path:
    """Write the same weights as a `.pt`, from mapped tensors."""
    import torch

    loaded = open_folder(folder / "model", "meta")
    target = folder / "model.pt"
    torch.save({name: p.data for name, p in loaded.module.model.named_parameters()}, target)
    return target


def status(field: str) -> float:
    """Return one line of /proc/self/status in GB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


class Anonymous:
    """Largest anonymous resident memory while the block runs."""

    def __enter__(self) -> Anonymous:
        self.gb, self._stop = status("RssAnon"), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.gb = max(self.gb, status("RssAnon"))

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.gb = max(self.gb, status("RssAnon"))


def open_folder(folder: Path, strategy: str) -> Any:
    from infer import load
    from infer.plan import Plan

    loaded = load.load(Plan(source=str(folder), load=strategy, data="random"))
    load.fill(loaded)
    return loaded


def import_all() -> None:
    """Import what every row needs, so that imports are in no row's time and in every row's memory."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import infer.compress.formats.cluster
    import infer.load  # noqa: F401
    from infer.kernels import cpu

    cpu.why_not()  # compiled now, where it wasn't


def child_imports(folder: Path) -> dict[str, Any]:
    import_all()
    return {"peak_gb": status("VmHWM"), "own_gb": status("RssAnon")}


def child_strategy(strategy: str) -> Callable[[Path], dict[str, Any]]:
    def run(folder: Path) -> dict[str, Any]:
        import_all()
        begin = time.perf_counter()
        with Anonymous() as own:
            model = open_folder(folder / "model", strategy).module.model
        return measured(model, own.gb, time.perf_counter() - begin)

    return run


def child_torch(folder: Path) -> dict[str, Any]:
    """Load as tutorials do: build the model, torch.load, load_state_dict."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    import_all()
    config = AutoConfig.from_pretrained(folder / "model")
    with Anonymous() as own:
        model = LlamaForCausalLM(config).eval()
        begin = time.perf_counter()
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True), strict=False)
        seconds = time.perf_counter() - begin
    return measured(model, own.gb, seconds)


def measured(model: Any, own: float, seconds: float) -> dict[str, Any]:
    """Measure memory right after loading, then the checksum, then one forward of 16 tokens."""
    import torch

    found: dict[str, Any] = {"peak_gb": status("VmHWM"), "own_gb": own, "load_s": seconds}
    found["checksum"] = checksum(model)
    begin = time.perf_counter()
    with torch.no_grad(), Anonymous() as anonymous:
        logits = model(input_ids=torch.arange(16)[None], use_cache=False).logits
    found |= {"forward_s": time.perf_counter() - begin, "forward_peak_gb": status("VmHWM")}
    return found | {"forward_own_gb": anonymous.gb, "finite": bool(torch.isfinite(logits).all())}


def checksum(model: Any) -> str:
    """Hash columns of some layers, through the layers themselves: unit vectors in, exact weights out."""
    import torch

    digest = hashlib.sha256()
    last = model.model.layers[-1]
    with torch.no_grad():
        for layer in (model.model.layers[0].self_attn.k_proj, last.mlp.down_proj, last.mlp.gate_proj):
            width = layer.weight.shape[1]
            columns = [0, 1, width // 2, width - 1]
            unit = torch.zeros(len(columns), width)
            unit[range(len(columns)), columns] = 1
            digest.update(layer(unit).contiguous().numpy().tobytes())
        digest.update(model.model.embed_tokens(torch.tensor([0, 7, 31999])).contiguous().numpy().tobytes())
        digest.update(model.model.norm.weight.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def child_quantize(folder: Path, quant: str) -> dict[str, Any]:
    """Read, quantize and drop block by block; write the packed tensors one by one."""
    from infer import load
    from infer.compress import quantize_model
    from infer.plan import Plan
    from infer.weights.safetensors_writer import write_safetensors

    import_all()
    begin = time.perf_counter()
    with Anonymous() as own:
        plan = Plan(source=str(folder / "model"), quant=quant, data="random")
        loaded = load.load(plan)
        done = quantize_model(loaded.module, plan, checkpoint=loaded.checkpoint, renames=loaded.renames)
        quantized = time.perf_counter() - begin
        load.fill(loaded)
        state = {name: value for name, value in loaded.module.state_dict().items() if "lm_head" not in name}
        metas = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
        write_safetensors(folder / PACKED, metas, state.__getitem__)
    found: dict[str, Any] = {
        "peak_gb": status("VmHWM"),
        "own_gb": own.gb,
        "load_s": time.perf_counter() - begin,
    }
    found |= {"quantize_s": quantized, "file_gb": (folder / PACKED).stat().st_size / 1e9}
    found["summary"] = {
        "bits per quantized weight": round(done.totals.bits, 4),
        "weight error": done.totals.weight_error,
    }
    return found | verified(folder, state, quant)


def verified(folder: Path, state: dict[str, Any], quant: str) -> dict[str, Any]:
    """Compare the file with the model, and decoded layers with the original (relative rms)."""
    import torch

    from infer import compress as formats
    from infer.load.checkpoint.weight_files import open_weights
    from infer.plan import Plan
    from infer.weights.safetensors_file import open_safetensors

    packed = open_safetensors(folder / PACKED).weights
    original, _ = open_weights(folder / "model")
    same = all(torch.equal(packed[n].rows(0, 64), state[n][:64]) for n in packed if state[n].ndim)
    name = "model.layers.0.self_attn.k_proj"
    prefix = f"model.{name}.packed."
    tensors = {n.removeprefix(prefix): packed[n].read() for n in packed if n.startswith(prefix)}
    weight = original[f"{name}.weight"].read()
    decoded = formats.get(Plan(source="", quant=quant)).dequantize(tensors)
    error = float((decoded - weight).norm() / weight.norm())
    return {"same": same, "error": error}


CHILDREN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "imports": child_imports,
    "torch": child_torch,
    **{name: child_strategy(name) for name in ("meta", "offload")},
    **{quant: partial(child_quantize, quant=quant) for quant in ("nf4", "cluster:4")},
    "write-pt": lambda folder: {"path": str(write_pt(folder))},
}


def run_row(name: str, folder: Path) -> dict[str, Any]:
    """Measure one row in this process."""
    return CHILDREN[name](folder)
