"""Malformed `quantization_config` through the readers; `python -m tests.fuzz.quantization_configs [SECONDS [SEED]]`.

The settings of a sound layer of each method lose keys, or get values of other types, huge numbers, nested garbage and
other methods' names; now and then its tensors change too. All rows and codes are read, every hundredth case through a
whole folder. It ends as tensors, or as a refusal with a sentence; any other exception makes the run fail.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer import Plan, load
from infer.errors import InferError
from infer.load.quantized_weights.methods import METHODS, open_quantized
from infer.weights import Checkpoint, in_memory
from tests.fuzz.seeds import try_seeds
from tests.support import tiny_decoders
from tests.support.mutations import VALUES, json_values
from tests.support.quantized_layers import CASES

SHAPE = (64, 128)
NAMES = (
    *("quant_method", "quant_algo", "bits", "group_size", "checkpoint_format", "version", "pack_dtype", "desc_act"),
    *("config_groups", "format", "sparsity_config", "transform_config", "weight_block_size", "ignore", "num_bits"),
    *("block_structure", "weights", "targets", "actorder", "strategy", "load_in_4bit", "modules_to_not_convert"),
)  # fmt: skip
DTYPES = (torch.int32, torch.int8, torch.uint8, torch.float16, torch.float32, torch.int64, torch.bool)


def malformed(settings: dict[str, Any], rng: random.Random) -> Any:
    """Return settings with one to four changes; now and then no object at all."""
    if rng.random() < 0.03:
        return rng.choice(VALUES)
    try:
        found: Any = json.loads(json_values(json.dumps(settings).encode(), rng))
    except (ValueError, RecursionError):  # a key twice in an empty object, or nested too deep to be written
        return {}
    if not isinstance(found, dict):
        return found
    for _ in range(rng.randrange(3)):
        way = rng.random()
        if way < 0.5:
            found[rng.choice(NAMES)] = rng.choice([*VALUES, *METHODS, 3, 4, 8, [128, 128], [0, 1], {"g": {}}])
        elif way < 0.7:
            found["quant_method"] = rng.choice(list(METHODS))
        elif groups := found.get("config_groups"):
            found["config_groups"] = {"g": rng.choice(VALUES), **(groups if isinstance(groups, dict) else {})}
    if rng.random() < 0.8:
        found["quant_method"] = settings["quant_method"]
    return found


def damaged(parts: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """Return the tensors of a layer with one of them absent, or of another shape, dtype or content."""
    name = rng.choice(list(parts))
    part, way = parts[name], rng.randrange(5)
    if way == 0:
        return {other: tensor for other, tensor in parts.items() if other != name}
    if way == 1:
        changed = part.to(rng.choice(DTYPES))
    elif way == 2:
        changed = part.reshape(-1)[: rng.randrange(part.numel() + 1)]
    elif way == 3:
        shape = [rng.choice((0, 1, 2, size, size + 1)) for size in part.shape]
        changed = torch.zeros(shape, dtype=part.dtype)
    elif part.dtype == torch.uint8 and part.dim() == 1:  # a state in JSON
        text = json_values(bytes(part.tolist()), rng)
        changed = torch.tensor(list(text), dtype=torch.uint8)
    else:
        changed = part.clone().reshape(-1)
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 100))
        changed = changed.reshape(part.shape)
    return {**parts, name: changed.contiguous()}


@cache
def sound_layers() -> list[Any]:
    """Return tensors, weight and settings of a layer of each method."""
    return [make(SHAPE, torch.Generator().manual_seed(0)) for make in CASES.values()]


def cases(seed: int) -> Iterator[tuple[int, dict[str, Tensor], Any]]:
    """Yield seeds, the tensors of a layer and malformed settings, without an end."""
    while True:
        rng = random.Random(seed)
        parts, _, settings = rng.choice(sound_layers())
        yield seed, damaged(parts, rng) if rng.random() < 0.3 else parts, malformed(settings, rng)
        seed += 1


def read_all(checkpoint: Checkpoint) -> None:
    for weight in checkpoint.values():
        weight.read()
        weight.rows(1, 2)
        codes = weight.codes()
        if codes is not None and not codes.refused:
            codes.rows(0, codes.shape[0])


def run(parts: dict[str, Tensor], settings: Any) -> str:
    """Open a layer and read all of it; returns "read", or "refused" with the beginning of the sentence."""
    held = {f"layer.{part}": tensor for part, tensor in parts.items()} | {"norm.weight": torch.ones(3)}
    try:
        read_all(open_quantized(in_memory(held), settings, "config.json")[0])
    except InferError as error:
        return f"refused: {error.message[:40]}"
    return "read"


def sound_folder(folder: Path) -> dict[str, Any]:
    """Write a tiny model whose projections are packed int4; returns its quantization_config."""
    from safetensors.torch import save_file

    model, held, settings = tiny_decoders.build("llama"), {}, {}
    rng = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        parts, _, settings = CASES["packed int4"]((tensor.shape[0], tensor.shape[1]), rng)
        held |= {f"{name.removesuffix('.weight')}.{part}": one.contiguous() for part, one in parts.items()}
    model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return settings


def run_folder(folder: Path, settings: Any) -> str:
    """Load a folder with these settings in its config.json."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps({**content, "quantization_config": settings}))
    try:
        loaded = load.load(Plan(source=str(folder), data="random"))
        load.fill(loaded)
    except InferError as error:
        return f"folder refused: {error.message[:40]}"
    return "folder read"


def main() -> int:
    with tempfile.TemporaryDirectory() as work:
        settings = sound_folder(Path(work))

        def attempt(seed: int) -> str:
            if seed % 100 == 0:
                run_folder(Path(work), malformed(settings, random.Random(seed)))
            _, parts, changed = next(cases(seed))
            try:
                return run(parts, changed)
            except Exception as error:
                error.add_note(str(changed)[:300])
                raise

        return try_seeds(attempt, 300)


if __name__ == "__main__":
    sys.exit(main())
