"""Rotary embeddings in captured programs: found in whatever form a model writes them, and computed by attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backends import eager
from infer.attention import KV_DTYPES, PageLayout
from infer.graph import storage
from infer.graph.program import Graph, plain_call
from infer.kernels import gpu
from infer.kernels.passes.rotary.form import HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES, RotaryForm
from infer.kernels.passes.rotary.fusion import fuse_rotary
from infer.library_errors import quiet
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from tests.support.program_devices import devices_in
from tests.support.tiny_decoders import SIZES, build

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
ROTARY = "infer.attend_paged_rotary.default"


@functools.cache
def step_of(name: str, qk_norm: bool = True) -> Graph:
    with quiet():
        model = build(name, sizes=SIZES[name] if qk_norm else {**SIZES[name], "use_qk_norm": False})
        return capture_step(model, probe(model, page=PAGE, kv_dtype="float32"))


def step_inputs(graph: Graph) -> dict[str, Tensor]:
    """Return a prompt of three tokens and one of two, in pages 2 and 1."""
    cache = next(spec for spec in graph.inputs if spec.name == "kv_cache")
    return {
        "token_ids": torch.tensor([5, 6, 7, 8, 9]),
        "positions": torch.tensor([0, 1, 2, 0, 1]),
        "slot_mapping": torch.tensor([8, 9, 10, 4, 5]),
        "block_table": torch.tensor([[2, 0], [1, 0]], dtype=torch.int32),
        "query_start": torch.tensor([0, 3, 5], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 2], dtype=torch.int32),
        "logit_rows": torch.tensor([0, 1, 2, 3, 4]),
        "kv_cache": torch.zeros((cache.shape[0], 3, cache.shape[2]), dtype=torch.uint8),
    }


def rotary_forms(program: Any) -> list[RotaryForm]:
    return [RotaryForm(*node.args[5:8]) for node in program.graph.nodes if str(node.target) == ROTARY]


@pytest.mark.parametrize(
    ("name", "qk_norm", "form"),
    [
        ("llama", True, RotaryForm(0, 16, HALVES)),
        ("gptj", True, RotaryForm(0, 8, INTERLEAVED)),
        ("gpt_oss", True, RotaryForm(0, 32, HALVES)),  # a cosine for each pair
        ("llama4_text", False, RotaryForm(0, 16, INTERLEAVED)),  # complex numbers
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_rotates_as_the_model_does(name: str, qk_norm: bool, form: RotaryForm) -> None:
    graph = step_of(name, qk_norm)
    program, found = fuse_rotary(graph.exported)
    assert [(f.what, f.value) for f in found] == [("rotary attention", 2)]
    assert rotary_forms(program) == [form, form]
    given = [step_inputs(graph) for _ in range(2)]
    want, got = graph.run(given[0]), replace(graph, program=program).run(given[1])
    torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-5, atol=1e-5)
    caches = [inputs["kv_cache"].view(torch.float32) for inputs in given]
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-5)


class Attention(nn.Module):
    """Attention of one layer whose queries and keys are turned by functions of (heads [T, H, D], cos, sin [T, D])."""

    def __init__(self, query: Callable[..., Tensor], key: Callable[..., Tensor]) -> None:
        super().__init__()
        self.turn_query, self.turn_key = query, key

    def forward(self, q: Tensor, k: Tensor, angles: Tensor, kv_cache: Tensor, table: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        query, key = self.turn_query(q, cos, sin), self.turn_key(k, cos, sin)
        slots = torch.zeros(q.shape[0], dtype=torch.int64)
        ends = (table[:, 0], table[0, :1])
        return torch.ops.infer.attend_paged(
            *(query, key, k, kv_cache, slots, table, *ends, None),
            *(0, PAGE, KV_DTYPES.index("float32"), 1.0, 0, 0.0),
        )


def half_turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + half_turned(x) * sin[:, None]


def sorted_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return plain(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def last_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 4:10], x[..., 10:]
    cos, sin = cos[:, None, :6], sin[:, None, :6]
    return torch.cat([x[..., :4], a * cos - b * sin, b * cos + a * sin], -1)


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] - half_turned(x) * sin[:, None]


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return plain(x, cos, sin) * 0.5


def with_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = plain(x, cos, sin)
    return turned * turned.square().mean(-1, keepdim=True).rsqrt()


def by_other_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return plain(x, cos.flip(-1), sin)


def one_head_less(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([plain(x, cos, sin)[:, :1], x[:, 1:]], 1)


def exported(query: Callable[..., Tensor], key: Callable[..., Tensor]) -> Any:
    layout = PageLayout(KV_HEADS, DIM, PAGE, "float32")
    given = (
        *(torch.randn(3, heads, DIM) for heads in (HEADS, KV_HEADS)),
        *(torch.randn(3, DIM), torch.zeros(1, 2, layout.num_bytes, dtype=torch.uint8)),
        torch.zeros(2, 2, dtype=torch.int32),
    )
    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, None, None)
    return torch.export.export(Attention(query, key), given, dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("turn", "form"),
    [
        (plain, RotaryForm(0, DIM, HALVES)),
        (sorted_pairs, RotaryForm(0, DIM, INTERLEAVED_TO_HALVES)),
        (last_columns, RotaryForm(4, 12, HALVES)),
    ],
)
def test_forms_are_found_in_any_operators(turn: Callable[..., Tensor], form: RotaryForm) -> None:
    program, _ = fuse_rotary(exported(turn, turn))
    assert rotary_forms(program) == [form]
    assert not [node for node in program.graph.nodes if str(node.target).startswith(("aten.cat", "aten.neg"))]


@pytest.mark.parametrize(
    ("query", "key", "said"),
    [
        *((turn, turn, "not one tensor rotated") for turn in (backwards, scaled, one_head_less, with_norm)),
        (plain, by_other_columns, "rotated by different cosines"),
        (plain, sorted_pairs, "rotated in different forms"),
        (plain, lambda x, cos, sin: x, "only one of queries and keys"),
    ],
)
def test_code_that_is_almost_a_rotation_is_not_fused(
    query: Callable[..., Tensor], key: Callable[..., Tensor], said: str
) -> None:
    program, [found] = fuse_rotary(exported(query, key))
    assert rotary_forms(program) == []
    assert found.value == 0
    assert said in found.why


def test_heads_that_are_not_rotated_are_no_finding() -> None:
    program, found = fuse_rotary(exported(lambda x, cos, sin: x, lambda x, cos, sin: x))
    assert (rotary_forms(program), found) == ([], [])


class _Launches(TorchDispatchMode):
    """Counts operators that compute: those whose result is no view of an operand, without allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not views and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def launches(graph: Graph) -> int:
    call, given = plain_call(graph.exported, graph.inputs), step_inputs(graph)
    with torch.no_grad(), _Launches() as mode:
        call(given)
    return mode.count


def test_eager_steps_launch_fewer_operators_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = step_of("llama")
    storage.save(graph, tmp_path)
    opened: list[Graph] = []
    monkeypatch.setattr(gpu, "packs", lambda device: True)
    monkeypatch.setattr(eager, "Runner", lambda graph, device: opened.append(graph))
    weights = storage.load_weights(tmp_path)
    monkeypatch.setattr(storage, "load_weights", lambda *_: {n: v.to("meta") for n, v in weights.items()})
    eager.open(tmp_path, "meta")
    fused = opened[0].exported
    assert len(rotary_forms(fused)) == 2
    assert list(devices_in(fused)) == ["meta"]
    before, after = launches(graph), launches(replace(graph, program=fuse_rotary(graph.exported)[0]))
    assert before - after == 20  # ten a layer: half-turns, products and sums of queries and of keys
