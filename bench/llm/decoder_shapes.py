"""Decoders of the speed bars: two Llama shapes with seeded random weights, and transformers' logits for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.shared.llama_checkpoint import LLAMA_1B, LLAMA_135M, make_checkpoint
from bench.shared.repository import ROOT

WORK = ROOT / ".work" / "lm"
POSITIONS = 4096
LONGEST = 2048  # tokens of the longest context and prompt
CHECKED = (128, 512, LONGEST)  # contexts after which logits are compared


@dataclass(frozen=True)
class Shape:
    """One decoder shape; `checkpoint` is a Hugging Face folder of float16 weights."""

    name: str
    sizes: dict[str, int] = field(repr=False)

    @property
    def folder(self) -> Path:
        return WORK / self.name

    @property
    def checkpoint(self) -> Path:
        def make(folder: Path) -> None:
            make_checkpoint(folder, self.sizes, dtype=torch.float16, positions=POSITIONS)

        return made(self.folder / "checkpoint", make)

    @property
    def tokens(self) -> Tensor:
        """Token ids int64 [LONGEST + 1], equal at every call."""
        generator = torch.Generator().manual_seed(7)
        return torch.randint(3, self.sizes["vocab_size"], (LONGEST + 1,), generator=generator)

    def logits(self) -> dict[int, Tensor]:
        """Return transformers' float32 logits: context → logits [vocab] of the token after that many."""

        def make(folder: Path) -> None:
            folder.mkdir()
            with torch.no_grad():
                out = self.model()(self.tokens[None], logits_to_keep=torch.tensor(CHECKED)).logits[0]
            save_file({str(n): row.clone() for n, row in zip(CHECKED, out, strict=True)}, folder / "logits")

        return {int(n): row for n, row in load_file(made(self.folder / "float", make) / "logits").items()}

    def model(self) -> torch.nn.Module:
        """Load the float32 original in transformers."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()


SHAPES = {shape.name: shape for shape in (Shape("135M", LLAMA_135M), Shape("1B", LLAMA_1B))}


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """Return `path`, which `make` fills the first time; a partial result is never taken for a whole one."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True) if partial.is_file() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(path)
    return path
