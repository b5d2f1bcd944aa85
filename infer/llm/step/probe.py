"""Probe of a causal language model: can it run step by step over a paged KV cache, and of which sizes.

A model is refused by name of what prevents it: a layer with state of its own, a mask that the paged operator does not
compute, or logits that differ from those of one whole run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from ...errors import NotUsableError
from .attention.mask_check import recorded_masks, wrong_mask
from .attention.paged_attention import INTERFACE, AttentionCall, use_paged_attention
from .full_sequence_runner import attention_inputs, state_inputs
from .paged_step import Step, example
from .state_layers import state_layers
from .step_shape import PAGE, StepShape
from .token_mixing import mixes, mixing_module, sample_tokens

_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
# New tokens of two sequences in each step of the trial run: prefill, one beside many, one token alone.
_CHUNKS = ((5, 1), (1, 4), (0, 1), (5, 5))
_MAX_ERROR = 1e-3  # relative, of float32 over a float32 cache; right ones are below 1e-5


def probe(
    model: nn.Module, *, page: int = PAGE, kv_dtype: str = "float16", run_chunks: bool = True
) -> StepShape:
    """Run a few tokens through `model` and record the attention settings of each layer.

    With `run_chunks` also two sequences in uneven chunks over a small cache, compared with the model's own forward;
    models on meta are not run on values. Raises `NotUsableError` with the reason.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with refusing_failures():
        shape = _probe_attention(model, page, kv_dtype, values=not on_meta)
        if run_chunks and not on_meta:
            _compare_chunks(model, shape)
    return shape


def _probe_attention(model: nn.Module, page: int, kv_dtype: str, *, values: bool) -> StepShape:
    step = Step(model, page, kv_dtype)
    step.records_attention = True
    tokens = sample_tokens(_vocab_size(model))
    with torch.no_grad(), use_paged_attention(model), recorded_masks(INTERFACE):
        seen, logits = base = _run(step, tokens[0])
        if values and _mixing(base, _run(step, tokens[1])):
            name = mixing_module(model, lambda row: _run(step, row), tokens)
            raise NotUsableError(
                f"layer {name} mixes tokens outside of transformers' attention interface: its state would be lost "
                "between steps"
            )
        floats = 0 if step.last is None else step.last.state.floats
        if not seen and not floats:
            raise NotUsableError("the model does not call transformers' attention interface")
        longest = _max_positions(model)
        for index, call in enumerate(seen):
            if reason := _wrong_attention(index, call, longest):
                raise NotUsableError(reason)
    shapes = [call.shape for call in seen]
    query_heads, kv_heads, head_dim = max(shapes, key=lambda shape: shape[1] * shape[2], default=(0, 0, 0))
    differ = len({shape[1:] for shape in shapes}) > 1
    return StepShape(
        layers=len(seen),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=logits.shape[-1],
        max_positions=longest,
        page=page,
        kv_dtype=kv_dtype,
        state_layers=len(state_layers(model)) if floats else 0,
        state_floats=floats,
        layer_shapes=tuple(shape[1:] for shape in shapes) if differ else (),
    )


def _run(step: Step, tokens: Tensor) -> tuple[list[AttentionCall], Tensor]:
    """Run one sequence in one call; return its recorded attention calls and the logits of every token."""
    count = len(tokens)
    named = example(torch.zeros((0, 0, 0), dtype=torch.uint8))
    named |= {"token_ids": tokens, "positions": torch.arange(count), "logit_rows": torch.arange(count)}
    logits = step(**named)
    return step.last.seen if step.last is not None else [], logits


def _wrong_attention(index: int, call: AttentionCall, longest: int) -> str | None:
    if call.refusal is not None:
        return call.refusal
    if not call.causal and call.mask is None:
        return f"attention call {index} is not causal: a token would see tokens that are not there yet"
    wrong = wrong_mask(call.mask, call.window, call.chunk, longest)
    if wrong is None:
        return None
    kind = f"a sliding window of {call.window} tokens" if call.window else "plain causal attention"
    kind = f"attention in chunks of {call.chunk} tokens" if call.chunk else kind
    return f"the mask of attention call {index} is not {kind}: {wrong}"


def _mixing(base: tuple[list[AttentionCall], Tensor], other: tuple[list[AttentionCall], Tensor]) -> bool:
    before = [base[1], *(x for call in base[0] for x in (call.query, call.key, call.value))]
    after = [other[1], *(x for call in other[0] for x in (call.query, call.key, call.value))]
    return any(mixes(a, b) for a, b in zip(before, after, strict=True))


def _compare_chunks(model: nn.Module, shape: StepShape) -> None:
    """Raise unless the step in uneven chunks gives the logits of the model's own forward."""
    small = replace(shape, page=4, kv_dtype="float32")
    length = sum(new[0] for new in _CHUNKS)
    first, second = sample_tokens(shape.vocab_size)
    ids = torch.stack([first[:length], second.flip(0)[:length]])
    step = Step(model, small.page, small.kv_dtype)
    table = torch.arange(7, -1, -1, dtype=torch.int32).reshape(2, 4)
    cache, states, done = small.new_cache(8), small.new_state(2), [0, 0]
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    with torch.no_grad():
        whole: Any = model
        expected = whole(input_ids=ids, use_cache=False).logits.float()
        with use_paged_attention(model):
            for new in _CHUNKS:
                tokens = torch.cat(
                    [ids[i, d : d + n] for i, (d, n) in enumerate(zip(done, new, strict=True))]
                )
                named = attention_inputs(small, done, new, table) | state_inputs(states, done, new)
                logits = step(token_ids=tokens, logit_rows=torch.arange(len(tokens)), kv_cache=cache, **named)
                for into, part in zip(rows, logits.split(new), strict=True):
                    into.append(part)
                done = [d + n for d, n in zip(done, new, strict=True)]
    got = torch.stack([torch.cat(part) for part in rows])
    require_equal(got, expected[:, : got.shape[1]])


def require_equal(got: Tensor, expected: Tensor) -> None:
    """Raise `NotUsableError` unless logits of steps are those of one run, all float32."""
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error <= _MAX_ERROR:
        raise NotUsableError(
            f"step by step over a paged cache its logits differ from those of one run by {error:.2g} (relative)"
        )


@contextlib.contextmanager
def refusing_failures() -> Iterator[None]:
    """Turn what a model's own code raises into `NotUsableError`."""
    try:
        yield
    except NotUsableError:
        raise
    except _FAILURES as error:
        raise NotUsableError(f"the model can't run over a paged cache: {error}") from error


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _max_positions(model: Any) -> int:
    named = (getattr(model.config, name, 0) for name in ("max_position_embeddings", "max_seq_len"))
    return int(next((most for most in named if most), 1 << 20))
