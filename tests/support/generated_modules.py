"""Random modules for tests: layers, residuals and the odd things that people's modules do, all decided by a seed.

A module is a `Recipe` of plain data, so that a pickle, a factory and an exported program of it are the same model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

ACTIVATIONS = (
    "ReLU",
    "GELU",
    "SiLU",
    "Tanh",
    "Sigmoid",
    "LeakyReLU",
    "ELU",
    "Hardswish",
    "Mish",
    "Softplus",
    "ReLU6",
)
VECTOR = ("linear", "layer_norm", "rms_norm", "batch_norm1d", "activation", "residual", "tied", "view", "weight_norm",
          "own_linear", "bare", "double", "half_buffer", "buffer", "in_place", "hooked", "bilinear",
          "einsum")  # fmt: skip
SEQUENCE = ("linear", "layer_norm", "rms_norm", "conv1d", "conv_transpose1d", "lstm", "gru", "rnn", "mha", "encoder",
            "decoder", "activation", "residual", "tied", "view", "masked", "in_place", "buffer", "bare", "shape_flow",
            "einsum", "cumsum")  # fmt: skip
IMAGE = ("conv2d", "conv2d_group", "conv2d_same", "conv_transpose2d", "batch_norm2d", "group_norm", "max_pool",
         "avg_pool", "upsample", "activation", "residual", "in_place", "instance_norm", "shape_flow", "pixel_shuffle",
         "conv3d")  # fmt: skip
ODDITIES = ("plain", "plain", "plain", "plain", "tuple", "list", "dict", "nested", "with_none", "scalar", "no_rows",
            "gives_input", "argmax", "boolean", "twice", "optional", "second_input", "unused", "training", "data_flow",
            "stateful", "counts", "input_written", "no_parameters", "python_number", "half_output")  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Parameters that determine one generated model."""

    seed: int
    family: str  # vector, sequence, image or ids
    width: int
    length: int
    blocks: tuple[tuple[str, int], ...]  # kind, seed of its options
    oddity: str

    @property
    def kinds(self) -> list[str]:
        return [self.family, *(kind for kind, _ in self.blocks), f"oddity {self.oddity}"]


def recipe(seed: int) -> Recipe:
    """Draw the recipe of a seed."""
    draw = random.Random(seed)
    family = draw.choice(("vector", "sequence", "sequence", "image", "image", "ids"))
    known = {"vector": VECTOR, "image": IMAGE}.get(family, SEQUENCE)
    count = draw.randint(1, 4)
    blocks = tuple((draw.choice(known), draw.getrandbits(16)) for _ in range(count))
    oddity = draw.choice(ODDITIES)
    width = draw.choice((16, 64, 64, 96)) if family != "image" else draw.choice((4, 16, 64))
    return Recipe(
        seed, family, width, draw.choice((1, 5, 8)), () if oddity == "no_parameters" else blocks, oddity
    )


class Block(nn.Module):
    """One layer of a kind, its options drawn from its own seed; keeps the shape of its input."""

    def __init__(self, kind: str, seed: int, width: int) -> None:
        super().__init__()
        draw = self.draw = random.Random(seed)
        self.kind, w = kind, width
        make = {
            "linear": lambda: nn.Linear(w, w, bias=draw.random() < 0.7),
            "own_linear": lambda: OwnLinear(w, w),
            "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(w, w)),
            "bilinear": lambda: nn.Bilinear(w, w, w),
            "layer_norm": lambda: nn.LayerNorm(w, elementwise_affine=draw.random() < 0.8),
            "rms_norm": lambda: nn.RMSNorm(w),
            "batch_norm1d": lambda: nn.BatchNorm1d(w),
            "batch_norm2d": lambda: nn.BatchNorm2d(w, affine=draw.random() < 0.8),
            "instance_norm": lambda: nn.InstanceNorm2d(w, affine=True),
            "group_norm": lambda: nn.GroupNorm(draw.choice((1, 2, 4)), w),
            "conv1d": lambda: nn.Conv1d(w, w, 3, padding=1, groups=draw.choice((1, 1, 2, w))),
            "conv_transpose1d": lambda: nn.ConvTranspose1d(w, w, 3, padding=1),
            "conv2d": lambda: nn.Conv2d(w, w, 3, padding=1, dilation=1, bias=draw.random() < 0.5),
            "conv2d_group": lambda: nn.Conv2d(w, w, 3, padding=2, dilation=2, groups=draw.choice((2, w))),
            "conv2d_same": lambda: nn.Conv2d(w, w, draw.choice((2, 3)), padding="same"),
            "conv3d": lambda: nn.Conv3d(w, w, (1, 3, 3), padding=(0, 1, 1)),
            "conv_transpose2d": lambda: nn.ConvTranspose2d(w, w, 2, stride=2),
            "lstm": lambda: nn.LSTM(w, w // 2, draw.choice((1, 2)), batch_first=True, bidirectional=True),
            "gru": lambda: nn.GRU(w, w, draw.choice((1, 2)), batch_first=draw.random() < 0.7),
            "rnn": lambda: nn.RNN(w, w, batch_first=True),
            "mha": lambda: nn.MultiheadAttention(
                w, draw.choice((1, 2, 4)), batch_first=True, bias=draw.random() < 0.7
            ),
            "masked": lambda: nn.MultiheadAttention(
                w, 2, batch_first=True, add_zero_attn=draw.random() < 0.3
            ),
            "encoder": lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(w, 2, 2 * w, batch_first=True, norm_first=draw.random() < 0.3),
                draw.choice((1, 2)),
                enable_nested_tensor=False,
            ),
            "decoder": lambda: nn.TransformerDecoderLayer(w, 4, w, activation="gelu", batch_first=True),
            "activation": lambda: getattr(nn, draw.choice(ACTIVATIONS))(),
        }.get(kind, lambda: nn.Linear(w, w) if kind in WITH_LINEAR else nn.Identity())
        self.layer = make()
        self.extras(kind, w)

    def extras(self, kind: str, w: int) -> None:
        if kind in ("tied", "residual"):
            self.other = nn.Linear(w, w)
        if kind == "tied":
            self.other.weight = self.layer.weight
        if kind == "view":  # two weights in one storage
            both = torch.randn(2 * w, w) / w**0.5
            self.other = nn.Linear(w, w)
            self.layer.weight, self.other.weight = nn.Parameter(both[:w]), nn.Parameter(both[w:])
        if kind == "bare":
            self.matrix, self.scale = nn.Parameter(torch.randn(w, w) / w**0.5), nn.Parameter(torch.ones(()))
        if kind == "einsum":
            self.matrix = nn.Parameter(torch.randn(2, w // 2, w) / w**0.5)
        if kind == "double":
            self.matrix = nn.Parameter(torch.randn(w, w, dtype=torch.float64) / w**0.5)
        if kind in ("buffer", "half_buffer"):
            half = torch.float16 if kind == "half_buffer" else torch.float32
            self.register_buffer("shift", torch.randn(w).to(half), persistent=self.draw.random() < 0.5)
            self.register_buffer("order", torch.randperm(w))
        if kind == "hooked":
            self.layer.register_forward_hook(halved)
        if kind == "pixel_shuffle":
            self.layer = nn.Sequential(nn.Conv2d(w, 4 * w, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:  # noqa: PLR0911, PLR0912 - a kind is a case
        kind, layer = self.kind, self.layer
        if kind in ("conv1d", "conv_transpose1d"):
            return layer(x.transpose(1, 2)).transpose(1, 2)
        if kind == "conv3d":
            return layer(x[:, :, None])[:, :, 0]
        if kind in ("lstm", "gru", "rnn"):
            return layer(x)[0]
        if kind == "mha":
            return x + layer(x, x, x, need_weights=False)[0]
        if kind == "masked":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            return layer(x, x, x, attn_mask=mask)[0]
        if kind == "decoder":
            return layer(x, x.flip(1))
        if kind == "bilinear":
            return layer(x, x)
        if kind == "residual":
            return x + (self.other(F.gelu(self.linear(x))) if x.dim() < 4 else layer(x))
        if kind in ("tied", "view"):
            return self.other(torch.relu(layer(x)))
        if kind == "bare":
            return x @ self.matrix * self.scale
        if kind == "einsum":
            y = torch.einsum("...i,hoi->...ho", x, self.matrix)
            return y.flatten(-2)
        if kind == "double":
            return (x.to(self.matrix.dtype) @ self.matrix).float()
        if kind in ("buffer", "half_buffer"):
            return layer(x)[..., self.order] + self.shift.to(x.dtype)
        if kind == "in_place":
            y = layer(x)
            y.relu_()
            y[..., 0] = 1.0
            y += 0.5
            return y
        if kind == "shape_flow":
            y = layer(x)
            return y + 1 if x.shape[-1] > 4 else y * 2
        if kind == "cumsum":
            return layer(x).cumsum(1) / 4
        if kind in POOLS:
            return POOLS[kind](x)
        return layer(x)

    @property
    def linear(self) -> nn.Module:
        return self.layer


class OwnLinear(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 0.5, self.bias)


def halved(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output * 0.5


WITH_LINEAR = (
    "residual", "tied", "view", "buffer", "half_buffer", "in_place", "hooked", "shape_flow", "cumsum",
)  # fmt: skip
POOLS = {
    "max_pool": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "upsample": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
}


@dataclass
class Given:
    """Inputs of a model: how they are declared, and how rows are drawn."""

    specs: tuple[str, ...]
    names: tuple[str, ...] = field(default=("x",))


class Generated(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        w = recipe.width
        if recipe.family == "image":
            self.stem = nn.Conv2d(3, w, 3, padding=1)
        elif recipe.family == "ids":
            self.stem = nn.Embedding(100, w, padding_idx=0 if recipe.seed % 2 else None)
        elif recipe.oddity == "no_parameters":
            self.stem = nn.Identity()
        else:
            self.stem = nn.Linear(24, w)
        image = recipe.family == "image"
        self.blocks = nn.ModuleList(
            ImageBlock(kind, seed, w)
            if image and kind in ("residual", "in_place", "shape_flow")
            else Block(kind, seed, w)
            for kind, seed in recipe.blocks
        )
        if recipe.oddity != "no_parameters":
            self.head = nn.Linear(w, 64 if recipe.seed % 3 else 10)
        if recipe.oddity == "unused":
            self.never, self.spare = nn.Linear(64, 64), nn.Parameter(torch.zeros(64, 64))
        self.register_buffer("calls", torch.zeros(()))
        for module in self.modules():  # norms that do something
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2.0)

    def features(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        for block in self.blocks:
            y = block(y)
        if y.dim() == 4:
            y = F.adaptive_avg_pool2d(y, 1).flatten(1)
        return self.head(y) if self.recipe.oddity != "no_parameters" else y.float().sin()

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:  # noqa: PLR0911, PLR0912 - an oddity is a case
        oddity = self.recipe.oddity
        if oddity == "input_written":
            x.mul_(2)
            if not x.is_floating_point():
                x.remainder_(100)  # ids stay within their table
        y = self.features(x)
        if oddity == "optional" and extra is not None:
            return y * 0
        if oddity == "second_input":
            return y + (extra.float() if extra is not None else 0.0)
        if oddity == "data_flow":
            return y if y.sum() > 0 else y * 2
        if oddity in ("stateful", "counts"):
            self.calls += 1
            return y + self.calls if oddity == "stateful" else y
        if oddity == "half_output":
            return y.half()
        outputs: dict[str, Any] = {
            "tuple": (y, y.mean(-1)),
            "list": [y * 2, y],
            "dict": {"logits": y, "extra": y.tanh()},
            "nested": {"a": [y, (y * 3, {"b": y.sum(-1)})]},
            "with_none": (y, None, y + 1),
            "scalar": (y, y.mean()),
            "no_rows": (y, y[:0]),
            "gives_input": (x, y),
            "argmax": (y, y.argmax(-1)),
            "boolean": (y, y > 0),
            "twice": (y, y),
            "python_number": (y, 3, True),
        }
        return outputs.get(oddity, y)


class ImageBlock(nn.Module):
    """Of images the blocks that are Linear elsewhere."""

    def __init__(self, kind: str, seed: int, width: int) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "residual":
            return torch.relu(x + y)
        if self.kind == "in_place":
            y += x
            return F.relu_(y)
        return y if x.shape[1] > 8 else y * 2


def build(seed: int) -> Generated:
    """Build the model of a seed, in the mode in which it would be saved."""
    made = Generated(recipe(seed))
    return made.train() if made.recipe.oddity == "training" else made.eval()


def inputs(recipe: Recipe) -> tuple[str, ...]:
    """Return the `--input` values of a recipe."""
    rows = {
        "vector": "x=float32[batch,24]",
        "sequence": f"x=float32[batch,{recipe.length},24]",
        "image": "x=float32[batch,3,8,8]",
        "ids": f"x=int64[batch,{recipe.length}]",
    }
    second = ("extra=bool[batch,1]" if recipe.family in ("vector", "image") else "extra=bool[batch,1,1]",)
    return (rows[recipe.family], *(second if recipe.oddity == "second_input" else ()))


def rows(recipe: Recipe, count: int, seed: int) -> dict[str, Tensor]:
    """`count` rows of inputs."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"vector": (24,), "sequence": (recipe.length, 24), "image": (3, 8, 8)}
    if recipe.family == "ids":
        made = {"x": torch.randint(0, 100, (count, recipe.length), generator=draw)}
    else:
        made = {"x": torch.randn(count, *shapes[recipe.family], generator=draw)}
    if recipe.oddity == "second_input":
        axes = (1,) if recipe.family in ("vector", "image") else (1, 1)
        made["extra"] = torch.rand(count, *axes, generator=draw) > 0.5
    return made
