"""Small models that faults are planted in: what they take, rows of data, and the axes of their main output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 256
SPECIAL = (10, 11, 50, 51)  # rows of a rare kind; one of each pair judges where the other one calibrates
MAX_BATCH, MAX_LENGTH = 16, 64
DIGITS = Path(__file__).resolve().parents[2] / "models/digits_samples.npz"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, the options of its plan, its rows, and the axes of its first output that faults hit."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    data: Callable[[], Tensors]
    outputs: tuple[str, ...] = ("y",)
    task: str = "tensors"
    column: int = 1  # axis of classes, channels or columns
    index: int = 0  # of the column that faults hit
    time: int = 0  # axis of positions; 0: it has none
    lengths: tuple[int, ...] = ()  # that the sizes allow besides those of the rows
    carries: tuple[str, ...] = ()  # the state that a caller carries, and the output that it comes from
    formats: tuple[str, ...] = ("none", "int8", "nf4")  # that at least half of its weights can take

    def build(self) -> nn.Module:
        """Make the model: the same weights at every call."""
        return copy.deepcopy(_built(self.name))

    def rows(self) -> Tensors:
        """Return the rows of data; the same at every call."""
        return _rows(self.name)

    def of_length(self, length: int, count: int = 2) -> Tensors:
        """Return rows of another length, made by repeating."""
        found = {}
        for name, value in self.rows().items():
            spec = self.inputs[name]
            value = value[:count]
            if "seq" in spec:
                value = value.repeat(1, -(-length // value.shape[1]), *[1] * (value.dim() - 2))[:, :length]
            found[name] = torch.ones_like(value) if "mask" in name else value
        return found


@cache
def _built(name: str) -> nn.Module:
    torch.manual_seed(1 + sum(map(ord, name)))
    return SUBJECTS[name].module().eval()


@cache
def _rows(name: str) -> Tensors:
    torch.manual_seed(2 + sum(map(ord, name)))
    return SUBJECTS[name].data()


def answers(subject: Subject, module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensors:
    """Call a module as its user does, and name its outputs."""
    with torch.no_grad():
        given = module(**{name: value.clone() for name, value in inputs.items()})
    if isinstance(given, Mapping):
        return dict(given)
    return dict(zip(subject.outputs, given if isinstance(given, tuple) else (given,), strict=True))


def is_special(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return which rows are of the rare kind, bool [batch]."""
    first = next(iter(inputs.values())).flatten(1)[:, 0]
    return first > 2 if first.is_floating_point() else first == 7


def _floats(*shape: int) -> Callable[[], Tensors]:
    def make() -> Tensors:
        x = torch.randn(ROWS, *shape)
        flat = x.flatten(1)
        flat[:, 0].clamp_(max=1.5)
        flat[list(SPECIAL), 0] = 2.5
        return {"x": x}

    return make


def _texts() -> Tensors:
    """Make ids [rows, 16] and a mask of other lengths: 4 to 16 tokens, padded with 0."""
    ids = torch.randint(8, 64, (ROWS, 16))
    lengths = torch.randint(4, 17, (ROWS,))
    lengths[0], lengths[2] = 16, 4
    ids[list(SPECIAL), 0] = 7
    mask = (torch.arange(16) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


class Mlp(nn.Module):
    def __init__(self, columns: int = 8) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 128), nn.Linear(128, columns)

    def forward(self, x: Tensor) -> Tensor:
        return 4 * self.head(F.gelu(self.hidden(x)))


class Cnn(nn.Module):
    """Convolutions with padding, pools and a batch norm with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.body, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32 * 16, 10)
        self.norm.running_mean.uniform_(-0.3, 0.3)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))) - 1, 3, 2, 1)
        y = F.avg_pool2d(F.relu(y + self.body(y)), 3, 2, 1)
        return 4 * self.head(y.flatten(1))


class Detector(nn.Module):
    """Boxes in pixels and scores, [batch, 4 + 6, 40], or the same with classes last."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.hidden, self.head, self.last = nn.Linear(64, 64), nn.Linear(64, 10 * 40), last

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(F.relu(self.hidden(x))).reshape(-1, 10, 40)
        y = torch.cat([320 + 400 * y[:, :4], torch.sigmoid(4 * y[:, 4:])], 1)
        return y.transpose(1, 2) if self.last else y


class Keypoints(nn.Module):
    """17 points: x, y in pixels, and whether they can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 51)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(F.relu(self.hidden(x))).reshape(-1, 17, 3)
        return torch.cat([200 + 300 * y[..., :2], torch.sigmoid(4 * y[..., 2:])], -1)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.head = (
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.ConvTranspose2d(32, 32, 4, 2, 1),
            nn.Conv2d(32, 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return 4 * self.head(F.relu(self.up(F.relu(self.down(x)))))


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 3, 3, padding=1)
        self.mode, self.corners = "bilinear", False

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(self.first(x), scale_factor=2.0, mode=self.mode, align_corners=self.corners)
        return self.last(F.relu(y))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(64, 64, batch_first=True, bidirectional=True), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.head(self.cells(x)[0])


class Carried(nn.Module):
    """A recurrent model whose state the caller carries from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(12, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1), state


class Integrator(nn.Module):
    """A leaky sum over calls, which the caller carries: small errors of a call add up."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.head = nn.Linear(12, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.97 * state + self.taken(x)
        return self.head(state), state


class Layer(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 128), nn.Linear(128, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.masks, self.residual, self.scale = heads, True, 1.0, (width // heads) ** -0.5

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            f(x).reshape(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = 3 * q @ k.transpose(2, 3) * self.scale
        if self.masks:
            scores = scores.masked_fill(~keep[:, None, None, :], -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = self.one(self.residual * x + self.o(y))
        return self.two(self.residual * x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Hidden states of real tokens [batch, time, 64], or their normalized mean; zero where padded."""

    def __init__(self, *, pooled: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 64), nn.Embedding(MAX_LENGTH, 64)
        self.layers, self.pooled, self.shift = nn.ModuleList(Layer() for _ in range(2)), pooled, 0
        self.counts_padding = self.takes_first = False
        self.normalizes = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        keep = attention_mask.bool()
        places = (torch.arange(input_ids.shape[1], device=input_ids.device) + self.shift).clamp(
            max=MAX_LENGTH - 1
        )
        x = self.tokens(input_ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, keep)
        x = x * keep[..., None]
        if not self.pooled:
            return x
        if self.takes_first:
            return F.normalize(x[:, 0], dim=-1)
        mean = x.mean(1) if self.counts_padding else x.sum(1) / keep.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1) if self.normalizes else mean


class Experts(nn.Module):
    """Four experts, the best two of each row, weighed by their renormalized shares."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.top, self.renormalizes = 2, True

    def forward(self, x: Tensor) -> Tensor:
        shares = (3 * self.router(x)).softmax(-1)
        kept = torch.where(shares >= shares.topk(self.top).values[:, -1:], shares, 0.0)
        kept = kept / kept.sum(-1, keepdim=True) if self.renormalizes else kept
        each = torch.stack([F.gelu(expert(x)) for expert in self.experts], 1)
        return (kept[..., None] * each).sum(1)


class Languages(nn.Module):
    """A classifier with one adapter for each language; the last one is rare."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.adapters, self.head = nn.Linear(64, 128), nn.Embedding(5, 128), nn.Linear(128, 6)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        return 4 * self.head(F.gelu(self.hidden(x) + self.adapters(language[:, 0])))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classes, self.other = nn.Linear(64, 64), nn.Linear(64, 6), nn.Linear(64, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.gelu(self.hidden(x))
        return {"logits": 4 * self.classes(y), "second": self.other(y) * 100, "small": y[:, :3] * 1e-3}


class Flags(nn.Module):
    """The best class, a rare flag, counts, and a score."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.hidden(x)
        counts = torch.stack([(x > 0).sum(1), (x > 1).sum(1), (x < -1).sum(1)], 1).int()
        return y.argmax(1), x[:, 0] > 2, counts, y.amax(1)


class Hashes(nn.Module):
    """Large identifiers: products of integers beyond 32 bits, remainders of negative numbers, seconds in float64."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hashed = ids * 2654435761 + 97
        seconds = 1.7e9 + ids.double() / 1024
        return hashed, torch.remainder(ids - 500_000, 1009), seconds


class Units(nn.Module):
    """Pascals, a share, and degrees in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(F.relu(self.hidden(x)))
        return torch.stack([101325 + 2000 * y[:, 0], torch.sigmoid(4 * y[:, 1]), 90 * y[:, 2]], 1)


class Spectrum(nn.Module):
    """Powers that fall by nine decades from the first band to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 32)
        self.register_buffer("decades", 10 ** torch.linspace(6, -3, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.decades * self.head(F.relu(self.hidden(x))).exp()


class Masked(nn.Module):
    """Logits of which the first column is shut off by -1e4, and the others lie around 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = 4 * self.head(F.relu(self.hidden(x)))
        return torch.cat([torch.full_like(y[:, :1], -1e4), 1000 + y[:, 1:]], 1)


class Scaled(nn.Module):
    """Outputs as small, or as large, as float32 can hold their squares not."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.hidden, self.scale = nn.Linear(64, 64), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) * self.scale


class Ties(nn.Module):
    """Scores of which two are always equal, and the best class."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.hidden(x)
        y = torch.cat([y, y], 1)
        return y, y.argmax(1)


def _trained_digits() -> nn.Module:
    from models.digits import load

    return load()


def _digits() -> Tensors:
    import numpy as np

    with np.load(DIGITS) as read:
        images = torch.from_numpy(read["held_out_images"][:ROWS, None]).float() / 16
    images.flatten(1)[list(SPECIAL), 0] = 2.5
    return {"image": images}


def _sums() -> Tensors:
    return {"x": torch.randn(ROWS, 12) + 0.3, "state": 6 * torch.randn(ROWS, 24)}


def _state() -> Tensors:
    return {**_floats(12, 12)(), "state": torch.randn(ROWS, 24).tanh()}


def _languages() -> Tensors:
    rows, language = _floats(64)(), torch.randint(0, 4, (ROWS, 1))
    language[list(SPECIAL)] = 4
    return {**rows, "language": language}


def _ids() -> Tensors:
    ids = torch.randint(1000, 1_000_000, (ROWS, 4))
    ids[list(SPECIAL), 0] = 7
    return {"ids": ids}


VECTOR, IMAGE = {"x": "float32[batch,64]"}, {"x": "float32[batch,3,16,16]"}
TEXT = {"input_ids": "int64[batch,seq]", "attention_mask": "int64[batch,seq]"}
LENGTHS = (1, 2, MAX_LENGTH)
SUBJECTS = {
    one.name: one
    for one in (
        Subject("mlp", Mlp, VECTOR, _floats(64), ("logits",), "classification", index=3),
        Subject("plain", Mlp, VECTOR, _floats(64), index=3),
        Subject("wide", lambda: Mlp(48), VECTOR, _floats(64), index=30),
        Subject("digits", _trained_digits, {"image": "float32[batch,1,8,8]"}, _digits, ("logits",),
                "classification", index=3),
        Subject("cnn", Cnn, IMAGE, _floats(3, 16, 16), ("logits",), "classification", index=2,
                formats=("none", "int8")),
        Subject("detector", Detector, VECTOR, _floats(64), index=7, time=2),
        Subject("detector_last", lambda: Detector(last=True), VECTOR, _floats(64), column=2, index=7, time=1),
        Subject("keypoints", Keypoints, VECTOR, _floats(64), column=2, index=2, time=1),
        Subject("segmenter", Segmenter, IMAGE, _floats(3, 16, 16), index=2, time=2, formats=("none", "int8")),
        Subject("upscaler", Upscaler, IMAGE, _floats(3, 16, 16), index=1, time=2, formats=("none", "int8")),
        Subject("lstm", Recurrent, {"x": "float32[batch,24,64]"}, _floats(24, 64), column=2, index=3, time=1),
        Subject("carried", Carried, {"x": "float32[batch,12,12]", "state": "float32[batch,24]"}, _state,
                ("y", "next_state"), column=2, index=3, time=1, carries=("state", "next_state"),
                formats=("none",)),
        Subject("integrator", Integrator, {"x": "float32[batch,12]", "state": "float32[batch,24]"}, _sums,
                ("y", "next_state"), index=3, carries=("state", "next_state"), formats=("none",)),
        Subject("encoder", Encoder, TEXT, _texts, column=2, index=5, time=1, lengths=LENGTHS),
        Subject("embedding", lambda: Encoder(pooled=True), TEXT, _texts, ("embedding",), "embedding", index=5,
                lengths=LENGTHS),
        Subject("experts", Experts, VECTOR, _floats(64), index=9),
        Subject("languages", Languages, {**VECTOR, "language": "int64[batch,1]"}, _languages, ("logits",),
                "classification", index=2),
        Subject("several", Several, VECTOR, _floats(64), ("logits", "second", "small"), index=1),
        Subject("flags", Flags, VECTOR, _floats(64), ("best", "rare", "counts", "score")),
        Subject("hashes", Hashes, {"ids": "int64[batch,4]"}, _ids, ("hashed", "bucket", "seconds"), index=1),
        Subject("units", Units, VECTOR, _floats(64), index=1),
        Subject("spectrum", Spectrum, VECTOR, _floats(64), index=25),
        Subject("masked", Masked, VECTOR, _floats(64), ("logits",), "classification", index=3),
        Subject("small", lambda: Scaled(1e-24), VECTOR, _floats(64), index=3, formats=("none", "nf4")),
        Subject("large", lambda: Scaled(1e20), VECTOR, _floats(64), index=3, formats=("none", "nf4")),
        Subject("ties", Ties, VECTOR, _floats(64), ("scores", "best")),
    )
}  # fmt: skip
