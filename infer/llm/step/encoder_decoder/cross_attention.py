"""Attention of an encoder-decoder's decoder to its source, over pages of the KV cache that the encoder's graph wrote.

The cross-attention modules of transformers project queries of the decoder, and keys and values of the encoder's output.
The two projections of the source belong to the encoder's graph, that of the queries to the step: each token is a
sequence of one query over the pages of its source, all of which it sees. T5's attention has a learned bias by distance,
which the operator adds; the positions of the others are read from the step's inputs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....errors import NotUsableError

Attend = Callable[..., Tensor]  # (module, query, key, value, **arguments) → [1, tokens, heads, width]
Read = Callable[
    [Tensor, float], Tensor
]  # (queries [1, heads, tokens, width], scale) → [1, tokens, heads, width]


class ProjectionNames(NamedTuple):
    """Names of a cross-attention module's projections and sizes; `out` "" where another module projects the output.

    Where `key` and `value` are one projection, keys are its first half.
    """

    query: str
    key: str
    value: str
    out: str
    heads: str
    width: str


# Ending of a module's name → its names.
PROJECTION_NAMES: dict[str, ProjectionNames] = {
    "EncDecAttention": ProjectionNames("q", "k", "v", "o", "n_heads", "key_value_proj_dim"),
    "encoder_attn": ProjectionNames("q_proj", "k_proj", "v_proj", "out_proj", "num_heads", "head_dim"),
    "crossattention": ProjectionNames(
        "q_attn", "c_attn", "c_attn", "c_proj", "num_heads", "head_dim"
    ),  # GPT-2
    "crossattention.self": ProjectionNames(
        "query", "key", "value", "", "num_attention_heads", "attention_head_size"
    ),
}


class CrossAttention(NamedTuple):
    """A cross-attention module of a decoder, and the names of its projections."""

    module: Any
    names: ProjectionNames

    @property
    def heads(self) -> int:
        return int(getattr(self.module, self.names.heads))

    @property
    def width(self) -> int:
        return int(getattr(self.module, self.names.width))

    @property
    def is_t5(self) -> bool:
        """True for T5's attention, which does not scale its logits."""
        return self.names.out == "o"

    @property
    def scale(self) -> float:
        return 1.0 if self.is_t5 else float(getattr(self.module, "scaling", self.width**-0.5))

    def project(self, which: str, x: Tensor) -> Tensor:
        """Project x [1, tokens, hidden] to [1, tokens, heads, width]."""
        flat: Tensor = getattr(self.module, getattr(self.names, which))(x)
        if which != "query" and self.names.key == self.names.value:
            flat = flat.chunk(2, -1)[which == "value"]
        return flat.unflatten(-1, (self.heads, self.width))

    def project_out(self, mixed: Tensor) -> Tensor:
        """Project the mixed values [1, tokens, heads * width] as the module itself does."""
        found: Tensor = getattr(self.module, self.names.out)(mixed) if self.names.out else mixed
        return found


def cross_attentions(model: nn.Module) -> list[CrossAttention]:
    """List the cross-attention modules of the decoder, in the order of its layers.

    Raises `NotUsableError` for a decoder whose cross-attention is of another form.
    """
    found = []
    for name, module in model.get_decoder().named_modules():  # type: ignore[operator]
        names = next((own for end, own in PROJECTION_NAMES.items() if f".{name}".endswith(f".{end}")), None)
        if names is not None and _has(module, *filter(None, names)):
            found.append(CrossAttention(module, names))
    if not found:
        raise NotUsableError(
            f"the decoder of {type(model).__name__} has no cross-attention of the form of T5, BART, GPT-2 or BERT, of "
            "which keys and values of a source are computed once"
        )
    return found


def _has(module: Any, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)


@contextlib.contextmanager
def use_source_pages(
    model: nn.Module, read: Read, attend: Attend, positions: Callable[[], Tensor], rows: Callable[[], Tensor]
) -> Iterator[None]:
    """Let the decoder of `model` read its source by `read` and its own tokens by `attend` within the context.

    `positions` returns those of the step's tokens, `rows` the tokens whose logits are wanted.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    replaced: list[tuple[nn.Module, Callable[..., Any]]] = [
        (cross.module, _cross(cross, read)) for cross in cross_attentions(model)
    ]
    for name, module in decoder.named_modules():
        last = name.rpartition(".")[2]
        if last == "SelfAttention" and _has(module, "compute_bias", "n_heads"):
            replaced.append((module, _t5_attention(module, attend)))
        elif last == "embed_positions":
            replaced.append((module, _positions(module, positions)))
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][:, rows()], *args[1:]))
    before = [module.__dict__.get("forward") for module, _ in replaced]
    for module, forward in replaced:
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        hook.remove()
        for (module, _), own in zip(replaced, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own


def _returns(module: Any, out: Tensor, bias: Any, *, has_bias: bool) -> tuple[Any, ...]:
    """Return what the module's own forward returns: older versions of T5's leave the weights out."""
    if not has_bias:
        return out, None
    code = inspect.signature(type(module).forward).parameters
    return (out, bias) if "output_attentions" in code else (out, bias, None)


def _cross(cross: CrossAttention, read: Read) -> Callable[..., Any]:
    def forward(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        query = cross.project("query", hidden_states).transpose(1, 2)
        out = cross.project_out(read(query, cross.scale).flatten(2))
        return _returns(module, out, None, has_bias=cross.is_t5)

    return forward


def _t5_attention(module: Any, attend: Attend) -> Callable[..., Any]:
    def forward(
        module: Any, hidden_states: Tensor, *_: Any, position_bias: Tensor | None = None, **__: Any
    ) -> tuple[Any, ...]:
        table = distance_bias(module) if position_bias is None else position_bias
        sizes = (int(module.n_heads), int(module.key_value_proj_dim))
        heads = (layer(hidden_states).unflatten(-1, sizes) for layer in (module.q, module.k, module.v))
        mixed = attend(module, *(x.transpose(1, 2) for x in heads), scaling=1.0, slopes=table)
        return _returns(module, module.o(mixed.flatten(2)), table, has_bias=True)

    return forward


def distance_bias(module: Any) -> Tensor:
    """Return the bias that a T5 decoder's self-attention adds, float32 [heads, distances]; the last is of all beyond.

    Its buckets grow with the logarithm of the distance and end at `relative_attention_max_distance`.
    """
    if not module.has_relative_attention_bias:
        return torch.zeros((int(module.n_heads), 1))
    longest = int(module.relative_attention_max_distance)
    device = module.relative_attention_bias.weight.device
    buckets = module._relative_position_bucket(
        -torch.arange(longest + 1, device=device),
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=longest,
    )
    values: Tensor = module.relative_attention_bias(buckets).float()
    # Dense by itself: a pass over packed programs removes the copy that `contiguous` makes.
    return torch.stack(values.unbind(1))


def _positions(module: Any, positions: Callable[[], Tensor]) -> Callable[..., Any]:
    """Embed the positions of a step: a table that begins `offset` rows in, of M2M100 after the padding's row."""
    table = "weights" if isinstance(getattr(module, "weights", None), Tensor) else "weight"
    skipped = int(getattr(module, "offset", 0) or 0)
    if table == "weights":
        skipped = int(module.padding_idx) + 1

    def forward(module: Any, *_: Any, **__: Any) -> Tensor:
        return F.embedding(positions() + skipped, getattr(module, table))[None]

    return forward
