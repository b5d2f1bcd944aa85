"""Layers with state of their own, rewritten over a state cache: `ops.state_space.state_cache` defines its rows.

Only the mixing of tokens is replaced; projections, convolution weights and norms stay the model's own modules, so that
they are quantized and adapted like all others. A layer is known by the name of its class; layers of other classes are
refused by `token_mixing`, and every rewritten model is compared with transformers' own forward when it is probed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Mixer = Callable[[Any, Tensor, "StateCall"], Tensor]


class StateCall:
    """State of one call of a step: each layer takes its numbers of a row, in the order of the calls.

    `positions` int64 [tokens], `cache` float32 [rows, floats], `segments` int64 [segments, 4]. Without a cache the
    state of every token is zero, so that no token sees another one.
    """

    def __init__(
        self, positions: Tensor, cache: Tensor | None = None, segments: Tensor | None = None
    ) -> None:
        self.positions, self._cache, self._segments = positions, cache, segments
        self.floats = 0  # of one row, taken so far

    def _tail(self, x: Tensor, floats: int) -> tuple[Tensor, Tensor, int]:
        """Return the state operands of an operator on x [tokens, …], reserving `floats` values of a state row."""
        offset, self.floats = self.floats, self.floats + floats
        if self._cache is not None and self._segments is not None:
            return self._cache, self._segments, offset
        first = torch.arange(len(x), device=x.device)
        nowhere = torch.full_like(first, -1)
        alone = torch.stack([first, first + 1, nowhere, nowhere], 1)
        return torch.zeros((0, 0), device=x.device), alone, offset

    def causal_conv(self, x: Tensor, conv: Any, activation: str | None = None) -> Tensor:
        """Convolve x [tokens, C] by the weights of a depthwise nn.Conv1d with the state of its own inputs."""
        weight = conv.weight.squeeze(1).float()
        bias = None if conv.bias is None else conv.bias.float()
        x = x.float()
        tail = self._tail(x, (weight.shape[1] - 1) * weight.shape[0])
        out: Tensor = torch.ops.infer.causal_conv(x, weight, bias, *tail, activation in ("silu", "swish"))
        if activation in (None, "silu", "swish"):
            return out
        from transformers.activations import ACT2FN

        return ACT2FN[activation](out)  # type: ignore[no-any-return]

    def gated_delta(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Apply the gated delta rule to query, key [tokens, Hk, Dk], value [tokens, Hv, Dv]."""
        tail = self._tail(value, value.shape[1] * query.shape[2] * value.shape[2])
        given = (x.float().contiguous() for x in (query, key, value, decay, beta))
        return torch.ops.infer.gated_delta(*given, *tail)  # type: ignore[no-any-return]

    def selective_scan(self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Run the state space model of Mamba on x [tokens, C], a [N, C]."""
        tail = self._tail(x, a.numel())
        given = (part.float().contiguous() for part in (x, step, a, b, c))
        return torch.ops.infer.selective_scan(*given, *tail)  # type: ignore[no-any-return]

    def ssd_scan(self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Run the state space model of Mamba2 on x [tokens, H, P], b and c [tokens, G, N]."""
        tail = self._tail(x, x.shape[1] * x.shape[2] * b.shape[2])
        given = (part.float().contiguous() for part in (x, step, a, b, c))
        return torch.ops.infer.ssd_scan(*given, *tail)  # type: ignore[no-any-return]

    def linear_scan(self, decay: Tensor, x: Tensor) -> Tensor:
        """Run h = decay h + x over x [tokens, C]."""
        tail = self._tail(x, x.shape[1])
        return torch.ops.infer.linear_scan(decay.float().contiguous(), x.float().contiguous(), *tail)  # type: ignore[no-any-return]


def _short_conv(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute LFM2's short convolution between two gates, x [tokens, hidden]."""
    before, after, values = layer.in_proj(x).chunk(3, -1)
    return layer.out_proj(after * call.causal_conv(before * values, layer.conv).to(x.dtype))  # type: ignore[no-any-return]


def _normalized(x: Tensor) -> Tensor:
    """Scale the last dimension to length one, as transformers' l2norm does."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(layer: Any, qkv: Tensor, a: Tensor, b: Tensor, call: StateCall) -> Tensor:
    """Convolve qkv [tokens, channels] and apply the gated delta rule: float32 [tokens, Hv, Dv]."""
    mixed = call.causal_conv(qkv, layer.conv1d, layer.activation)
    parts = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    query, key = (_normalized(part.unflatten(-1, (-1, layer.head_k_dim))) for part in parts[:2])
    value = parts[2].unflatten(-1, (-1, layer.head_v_dim))
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias)
    return call.gated_delta(query * layer.head_k_dim**-0.5, key, value, decay, b)


def _qwen_next(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    projected = layer.in_proj_qkvz(x)[None], layer.in_proj_ba(x)[None]
    query, key, value, z, b, a = (part[0] for part in layer.fix_query_key_value_ordering(*projected))
    qkv = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    out = _delta_rule(layer, qkv, a, b.sigmoid(), call).to(x.dtype)
    return layer.out_proj(layer.norm(out, z).flatten(1))  # type: ignore[no-any-return]


def _qwen(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    out = _delta_rule(layer, layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x).sigmoid(), call)
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.out_proj(layer.norm(out.to(x.dtype), z).flatten(1))  # type: ignore[no-any-return]


def _olmo(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    beta = layer.b_proj(x).sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0)
    out = _delta_rule(layer, qkv, layer.a_proj(x), beta, call).to(x.dtype)
    gate = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.o_proj(layer.o_norm(out, gate).flatten(1))  # type: ignore[no-any-return]


def _mamba2(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute a Mamba2 layer: one projection, a convolution, the scan, a gated norm."""
    projected = layer.in_proj(x * getattr(layer, "ssm_in_multiplier", 1.0))
    projected = projected * layer.mup_vector[0, 0] if hasattr(layer, "mup_vector") else projected
    inner, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    gate, mixed, step = projected.split([inner, layer.conv_dim, layer.num_heads], -1)
    values, b, c = call.causal_conv(mixed, layer.conv1d, layer.activation).split([inner, states, states], -1)
    step = functional.softplus(step.float() + layer.dt_bias.float()).clamp(*layer.time_step_limit)
    values = values.unflatten(-1, (layer.num_heads, layer.head_dim))
    b, c = (part.unflatten(-1, (layer.n_groups, -1)) for part in (b, c))
    out = call.ssd_scan(values, step, -layer.A_log.float().exp(), b, c) + layer.D.float()[:, None] * values
    flat = out.flatten(1).to(x.dtype)
    plain = not getattr(layer, "mamba_rms_norm", True)
    normed = flat * functional.silu(gate) if plain else layer.norm(flat, gate)
    return layer.out_proj(normed.to(x.dtype))  # type: ignore[no-any-return]


def _mamba(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute a Mamba layer; FalconMamba and Jamba have norms between the projections."""
    values, gate = layer.in_proj(x).chunk(2, -1)
    values = call.causal_conv(values, layer.conv1d, layer.activation)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, b, c = layer.x_proj(values.to(x.dtype)).split(sizes, -1)
    if hasattr(layer, "dt_layernorm"):
        step, b, c = layer.dt_layernorm(step), layer.b_layernorm(b), layer.c_layernorm(c)
    step = functional.softplus(layer.dt_proj(step).float())
    a = -layer.A_log.float().exp().t()
    out = call.selective_scan(values, step, a, b[:, None], c[:, None]) + layer.D.float() * values
    return layer.out_proj((out * functional.silu(gate.float())).to(x.dtype))  # type: ignore[no-any-return]


def _recurrent_block(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute RecurrentGemma's block: a convolution and the RG-LRU, gated by another branch."""
    unit, heads = layer.rg_lru, layer.rg_lru.num_attention_heads
    values = call.causal_conv(layer.linear_x(x), layer.conv_1d).to(x.dtype)
    by_head = values.unflatten(-1, (heads, -1)).transpose(0, 1)
    gates = [
        torch.sigmoid(torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).flatten(1)).float()
        for weight, bias in (
            (unit.input_gate_weight, unit.input_gate_bias),
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
        )
    ]
    log_decay = -8.0 * gates[1] * functional.softplus(unit.recurrent_param.float())
    first = (call.positions == 0)[:, None]
    scale = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    decay = torch.where(first, 0.0, log_decay.exp())
    out = call.linear_scan(decay, values.float() * gates[0] * scale)
    return layer.linear_out(out.to(x.dtype) * layer.act_fn(layer.linear_y(x)))  # type: ignore[no-any-return]


_MAMBA2 = ("Mamba2Mixer", "FalconH1Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer")
MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _short_conv),
    "Qwen3NextGatedDeltaNet": _qwen_next,
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _qwen),
    "OlmoHybridGatedDeltaNet": _olmo,
    **dict.fromkeys((*_MAMBA2, "Zamba2MambaMixer"), _mamba2),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _mamba),
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
}
_RETURNS_PAIR = {"RecurrentGemmaRecurrentBlock"}  # the output, and None


def state_layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of `model` that are rewritten over a state cache."""
    return [module for module in model.modules() if type(module).__name__ in MIXERS]


@contextlib.contextmanager
def use_state_cache(model: nn.Module, call: Callable[[Tensor], StateCall]) -> Iterator[None]:
    """Rewrite the layers of `model` within the context; `call` gives the state for input [batch, seq, hidden]."""
    layers = state_layers(model)
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, call)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _forward(
    layer: nn.Module, call: Callable[[Tensor], StateCall], hidden_states: Tensor, *_: Any, **__: Any
) -> Tensor | tuple[Tensor, None]:
    """Stand in for the layer's forward on [batch, seq, hidden]; a step has a batch of one."""
    name = type(layer).__name__
    flat = MIXERS[name](layer, hidden_states.flatten(0, 1), call(hidden_states))
    out = flat.unflatten(0, hidden_states.shape[:2])
    return (out, None) if name in _RETURNS_PAIR else out
