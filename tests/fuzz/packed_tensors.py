"""Malformed packed codes, as an artifact may hold them; `python -m tests.fuzz.packed_tensors [SECONDS [SEED]]`.

A sound weight in one of the forms of `coded_weight` gets parts of other shapes, dtypes and numbers, or loses some.
It is refused with a reason; or it is decoded, its codes are carried over to other formats, and its product on the
native kernels is near that of the slow twin. Any other exception makes the run fail, and so does another product.
"""

from __future__ import annotations

import random
import sys

import torch
from torch import Tensor

from infer.export.gguf_codes import carry
from infer.export.packed_linears import carried
from infer.export.packed_tensors import PackedTensors
from infer.kernels import cpu
from infer.kernels.cpu.groupwise_layout import groupwise_layout, pack_groupwise
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_packed import groupwise_twin
from infer.weights import in_memory
from tests.fuzz.quantization_configs import damaged
from tests.fuzz.seeds import try_seeds
from tests.support.groupwise_operands import FORMS, operands

ROWS, COLUMNS = 20, 320


def run(seed: int) -> str:
    """Return "refused", or "read" where the parts are a weight; raise what is neither."""
    rng = random.Random(seed)
    form = rng.choice(FORMS)
    columns = 512 if form[2] == torch.uint8 else COLUMNS + -COLUMNS % form[0]
    parts = (
        damaged(operands(form, ROWS, columns), rng) if rng.random() < 0.9 else operands(form, ROWS, columns)
    )
    packed = PackedTensors(in_memory(parts), "keep")
    if packed.wrong(ROWS, columns):
        return "refused"
    try:
        weight = packed.decoded()
        codes = packed.codes()
        if not codes.refused:
            carry(codes)
            carried(codes)
    except ValueError:
        return "refused"
    return _product(parts, weight) if set(parts) <= set(CodedWeight._fields) else "read"


def _product(parts: dict[str, Tensor], weight: Tensor) -> str:
    if cpu.why_not() is not None:
        return "read"
    x = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        coded = CodedWeight.of(parts)
        layout = groupwise_layout(coded)
        operands = pack_groupwise(coded, layout)
        found = torch.ops.infer.linear_groupwise_packed(x, *operands, None, layout, len(weight))
    except (ValueError, RuntimeError):
        return "read, not packed"
    wanted = groupwise_twin(x, coded)
    size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    near = ((found - wanted).abs() <= 1e-5 * size) | ~size.isfinite() | ~wanted.isfinite()
    if not bool(near.all()):
        about = {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}
        raise AssertionError(f"other products than those of the slow twin: {about}")
    return "read"


if __name__ == "__main__":
    sys.exit(try_seeds(run, 300))
