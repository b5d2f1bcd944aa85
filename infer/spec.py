"""Tensor specs, and what every stage reports: choices, findings, layer formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from .errors import InputError, UsageError

if TYPE_CHECKING:
    import torch

    DTYPES: dict[str, torch.dtype]
    DTYPE_NAMES: dict[torch.dtype, str]

NAMES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
KV_DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "float8_e4m3fn",
)  # of a KV cache; kernels take the index
BATCH = "batch"  # symbolic size of the rows
UNBOUNDED = 1 << 30  # upper limit of a symbolic size that nothing limits
# Requests that may share a batch: all, padded to one length; those of equal lengths; none.
Joins = Literal["padded", "equal", "none"]
DECODER_IDS = "decoder_input_ids"  # tokens of the decoder of an encoder-decoder
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", DECODER_IDS)
ZERO_SHOT_IMAGES = "zero-shot-image-classification"  # task of CLIP and its kin: each image with each text
CHOICES = 4  # of a question, in the samples of a multiple choice model: so many rows one after another
ALIASES = {"fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
ALIASES |= {"fp64": "float64", "f64": "float64", "i64": "int64", "i32": "int32", "u8": "uint8", "i8": "int8"}
ALIASES |= {"fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn"}

_INPUT = re.compile(r"^(?P<name>[A-Za-z_][\w.:/-]*)=(?P<dtype>\w+)\[(?P<dims>[^\]]*)\]$")
_DIM = re.compile(r"^[A-Za-z_]\w*$")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([KMG]?I?)B?\s*", re.IGNORECASE)


def keyword(name: str) -> str:
    """Return a name as a Python identifier: `input.1` becomes `input_1`."""
    found = re.sub(r"\W|^(?=\d)", "_", name)
    return f"{found}_" if iskeyword(found) or found == "self" else found


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one input or output of a model.

    `dtype` is a name such as "float32" or "int64". A size in `shape` is a number, or the name of a symbolic size, which
    has one value in all inputs and outputs of a call. The symbolic size of rows is called "batch", and may be any axis;
    whether requests may share a batch is not said by the name: see `Joins`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def keyword(self) -> str:
        """The name as a Python identifier, by which a captured program takes it."""
        return keyword(self.name)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} [{', '.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Make a spec from text such as `ids=int64[batch,seq]`; raise `UsageError` for any other form."""
        match = _INPUT.match(text.replace(" ", ""))
        if match is None:
            raise UsageError(f"expected NAME=DTYPE[DIMS], got {text!r}", hint="Example: ids=int64[batch,seq]")
        dtype = ALIASES.get(match["dtype"], match["dtype"])
        if dtype not in NAMES:
            raise UsageError(f"no dtype named {match['dtype']!r}", hint=f"Known: {', '.join(NAMES)}")
        return cls(
            match["name"], dtype, tuple(_size(part, text) for part in match["dims"].split(",") if part)
        )

    def format(self) -> str:
        """Return the text that `parse` takes, such as `ids=int64[batch,seq]`."""
        return f"{self.name}={self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def batch_axis(self) -> int | None:
        """The axis of the rows; None where all rows share this tensor."""
        return self.shape.index(BATCH) if BATCH in self.shape else None

    @property
    def batched(self) -> bool:
        return BATCH in self.shape

    def with_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Repeat or cut the rows of a batched tensor to exactly `rows`; return an unbatched one unchanged."""
        return self.with_sizes(tensor, {BATCH: rows})

    def with_sizes(self, tensor: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """Repeat or cut a tensor along each axis of these symbolic sizes; an axis of length 0 stays so."""
        for axis, name in enumerate(self.shape):
            if isinstance(name, str) and name in sizes and (have := tensor.shape[axis]):
                times = [1] * tensor.dim()
                times[axis] = -(-sizes[name] // have)
                tensor = tensor.repeat(times).narrow(axis, 0, sizes[name])
        return tensor.contiguous()

    def check(
        self, array: np.ndarray | torch.Tensor, where: str = "", sizes: dict[str, int] | None = None
    ) -> None:
        """Raise `InputError` unless dtype and shape fit; `sizes` collects symbolic sizes across tensors."""
        dtype = str(array.dtype).removeprefix("torch.")
        got = f"{dtype} {list(array.shape)}"
        if dtype != self.dtype or len(array.shape) != len(self.shape):
            raise InputError(f"expected input {self}, got {got}", where=where)
        bound = {} if sizes is None else sizes
        for want, have in zip(self.shape, array.shape, strict=True):
            expected = bound.setdefault(want, int(have)) if isinstance(want, str) else want
            if expected != have:
                named = f" with {want}={expected}" if isinstance(want, str) else ""
                raise InputError(f"expected input {self}{named}, got {got}", where=where)


def check_sizes(
    actual: Mapping[str, int],
    limits: Mapping[str, tuple[int, int]],
    *,
    splits: bool,
    joins: Joins = "padded",
    multiples: Mapping[str, int] | None = None,
) -> None:
    """Raise `InputError` for a symbolic size beyond its limits or that is not a multiple of what it must be.

    `splits`: more rows run in several batches.
    """
    for size, have in actual.items():
        if multiples and have % multiples.get(size, 1):
            raise InputError(
                f"expected {size} to be a multiple of {multiples[size]}, got {have}", where="request.inputs"
            )
        low, high = limits.get(size, (0, have))
        if low <= have <= high or (splits and size == BATCH and have > high):
            continue
        whole = joins == "none" and size == BATCH and have > high
        wanted = f"of at least {low}" if high >= UNBOUNDED else f"between {low} and {high}"
        raise InputError(
            f"expected {size} {wanted}, got {have}",
            where="request.inputs",
            hint="Rows of a batch depend on each other, so that a request is never split" if whole else "",
        )


def text_padding(pad_id: int) -> dict[str, int]:
    """Return the inputs of which rows of token ids may be padded to one length, and the value that fills each."""
    return {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0}


def __getattr__(name: str) -> Any:
    """`DTYPES`: name → torch dtype, and `DTYPE_NAMES`, its inverse; torch is imported for those who ask."""
    if name not in ("DTYPES", "DTYPE_NAMES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    dtypes = {known: getattr(torch, known) for known in NAMES}
    return dtypes if name == "DTYPES" else {value: known for known, value in dtypes.items()}


def _size(part: str, text: str) -> int | str:
    if part.isdigit() and int(part) > 0:
        return int(part)
    if _DIM.match(part):
        return part
    raise UsageError(f"a size is a positive number or a name, got {part!r} in {text!r}")


def parse_size(text: str | int | None, where: str) -> int | None:
    """Convert `2GiB`, `500MB` or `1048576` to bytes; raise `UsageError` for anything else."""
    if text is None or isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise UsageError(f"expected a size like 2GiB or 500MB, got {text!r}", where=where)
    return size


class Choice(msgspec.Struct, frozen=True):
    """One resolved option: what was asked, the value taken, and the reason."""

    what: str
    asked: str
    value: str
    reason: str


class Finding(msgspec.Struct, frozen=True):
    """One measured or decided fact, for display only: code decides on typed results.

    `stage` names the step that found it (load, shrink, capture, lower, compare, time, memory, ...), `what` the fact,
    `value` and `unit` its amount, `why` the explanation.
    """

    stage: str
    what: str
    value: float | int | str | bool | None
    unit: str = ""
    why: str = ""


# pin: the user, by name; budget: --bits or --max-drop; speed: it is slower in the format asked for; sensitivity: it
# rose because the fidelity gate failed; refused: the format does not take it.
DecidedBy = Literal["", "pin", "budget", "speed", "sensitivity", "refused"]


class LayerChoice(msgspec.Struct, frozen=True):
    """The format of one layer. `effect` is what each format alone does to the model's output, where it was measured:
    KL in nats per row for logits, otherwise the squared relative error; both add up over layers in first order.
    """

    name: str
    format: str  # "float", "int8", "cluster:3", …
    bits: float  # per weight, tables and scales included
    weight_error: float | None = None  # relative rms
    effect: dict[str, float] = {}
    why: str = ""  # for display
    by: DecidedBy = ""  # who decided the format; "" for one that has the format asked for


def work_of_rows(lengths: Sequence[int] | np.ndarray, attention_length: int) -> float:
    """Return the work of rows that run without padding, in tokens whose attention costs nothing.

    `lengths`: real tokens of each row; `attention_length`: tokens at which attention takes as long as the rest.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return float((tokens * (1 + tokens / attention_length)).sum())
