"""Fused programs of decoder layers: found in captured steps, and equal to the operators they replace."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from infer.compress import quantize_model
from infer.kernels import cpu
from infer.kernels.cpu import build as compiling
from infer.kernels.passes import prepack
from infer.kernels.passes.fused_program import match, picked_rows
from infer.llm.step.full_sequence_runner import attention_inputs
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.llm.step.step_shape import StepShape
from infer.load.model_patches.moe_layers import split_experts
from infer.plan import Plan
from tests.support.tiny_decoders import GROUPED, SIZES, VOCABULARY, build

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers and the exporter have many to give
    pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler"),
]
# Whole groups of 64 columns, so that every layer can be nf4.
WIDER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128},
    "opt": {"hidden_size": 128, "ffn_dim": 192, "word_embed_proj_dim": 128},
    "falcon (alibi)": {
        "hidden_size": 128,
        "num_attention_heads": 8,
    },  # heads of 16: a root that is a power of two
}
PLAIN = {"hidden_size": 128, "intermediate_size": 192}
# Layers that are all equal: one is captured in half the time; the others show how a layer follows another.
ONE_LAYER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("mistral", "gemma", "phi3", "gpt_neox", "starcoder2", "olmo2"), {"num_hidden_layers": 1}
    ),
    **dict.fromkeys(("mixtral", "gpt_neox_japanese", "falcon"), {"num_hidden_layers": 1}),
    **dict.fromkeys(("falcon (new decoder)", "falcon (alibi)"), {"num_hidden_layers": 1}),
    **dict.fromkeys(("codegen", "gptj", "bloom"), {"n_layer": 1}),
    "mpt": {"n_layers": 1},
    "xglm": {"num_layers": 1},
}
# Some of their operators have no form in a fused program yet and run one by one.
PARTLY_FUSED = {
    *("gpt_oss", "mixtral", "llama4_text", "deepseek_v3", "gemma4_text", "bloom", "codegen", "falcon"),
    *("falcon (new decoder)", "falcon (alibi)", "gpt_neox_japanese", "gptj", "mpt", "xglm", "doge"),
}
BATCHES = [(1,), (3,), (17,), (1, 1, 1), (5, 1, 2)]  # new tokens of each sequence


@cache  # nothing changes a program
def step_of(name: str, quant: str = "nf4", **sizes: int) -> tuple[ExportedProgram, StepShape]:
    model = build(name, **(WIDER.get(name, PLAIN) | ONE_LAYER.get(name, {}) | sizes))
    quantize_model(model, Plan(source="test", quant=quant))
    shape = probe(model, page=4, kv_dtype="float32")
    return capture_step(model, shape).exported, shape


@cache
def packed_step(name: str, quant: str = "nf4") -> ExportedProgram:
    return prepack.packed(step_of(name, quant)[0])


@cache
def module_of(program: ExportedProgram) -> nn.Module:
    return program.module()


class Running:
    """A step with its own cache."""

    def __init__(self, program: ExportedProgram, shape: StepShape, sequences: int) -> None:
        self.module, self.shape, self.done = module_of(program), shape, [0] * sequences
        self.table = torch.arange(sequences * 9, dtype=torch.int32).reshape(sequences, 9)
        self.cache = shape.new_cache(sequences * 9)

    def __call__(self, ids: Tensor, new: tuple[int, ...], rows: Tensor) -> Tensor:
        named = attention_inputs(self.shape, self.done, list(new), self.table)
        self.done = [d + n for d, n in zip(self.done, new, strict=True)]
        with torch.no_grad():
            logits: Tensor = self.module(token_ids=ids, logit_rows=rows, kv_cache=self.cache, **named)
        return logits


def targets(program: ExportedProgram) -> Counter[str]:
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


def differences(name: str, quant: str) -> list[float]:
    """Return relative differences of fused programs from single operators, one for each batch and step."""
    step, shape = step_of(name, quant)
    programs = packed_step(name, quant), prepack.packed(step, fuse_layers=False)
    assert not any("chain" in target for target in targets(programs[1]))
    found = []
    torch.manual_seed(0)
    for new in BATCHES:
        fused, plain = (Running(program, shape, len(new)) for program in programs)
        for rows in (torch.tensor([sum(new) - 1]), torch.arange(sum(new)).flip(0)):
            ids = torch.randint(3, VOCABULARY, (sum(new),))
            got, expected = fused(ids, new, rows), plain(ids, new, rows)
            assert got.shape == expected.shape == (len(rows), VOCABULARY)
            found.append(float((got - expected).norm() / expected.norm()))
    return sorted(found)


@pytest.mark.parametrize("name", SIZES)
def test_fused_decoder_layers_equal_single_operators(name: str) -> None:
    found = differences(name, "nf4")
    # A last bit more or less may change how one activation is rounded to int8, which shows in a tiny model.
    assert found[len(found) * 2 // 3] < 2e-6
    assert found[-1] < 0.03


@pytest.mark.parametrize(("name", "quant"), [("qwen3", "int8"), ("gpt_neox", "int8"), ("qwen3", "nf4:16")])
def test_int8_layers_and_groups_of_16_are_fused(name: str, quant: str) -> None:
    found = differences(name, quant)
    assert targets(packed_step(name, quant))["infer.chain_attend.default"] == 1
    assert found[len(found) * 2 // 3] < 2e-6
    assert found[-1] < 0.03


@pytest.mark.parametrize("name", [name for name in SIZES if name not in PARTLY_FUSED])
def test_fusion_covers_every_linear_norm_and_rotation(name: str) -> None:
    found = targets(packed_step(name))
    left = [
        t for t in found if any(part in t for part in ("packed", "norm", "rotate", "silu", "gelu", "pow"))
    ]
    assert left == []
    assert found["infer.chain_attend.default"] == 1
    assert found["infer.attend_native.default"] + found["infer.chain.default"] == 0


def test_a_decoder_row_is_bit_equal_for_any_batch_and_threads() -> None:
    # Large enough that even one token is worth several threads.
    step, shape = step_of("qwen3", hidden_size=256, intermediate_size=1024)
    program = prepack.packed(step)
    ids, last = torch.randint(3, VOCABULARY, (3,)), torch.arange(3)
    threads = torch.get_num_threads()
    rows = []
    try:
        for count in (1, threads, 5):
            torch.set_num_threads(count)
            rows.append(Running(program, shape, 3)(ids, (1, 1, 1), last)[1])
            rows.append(Running(program, shape, 1)(ids[1:2], (1,), last[:1])[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2", "neon_dotprod", "scalar"])
def test_fused_decoder_layers_are_equal_on_all_instruction_sets(isa: str) -> None:
    cpu.load()
    if isa not in cpu.isas():
        pytest.skip(f"no {isa} here")
    step, shape = step_of("llama")
    before, ids = cpu.isa(), torch.tensor([5, 6, 7])
    results = []
    try:
        for name in ("scalar", isa):
            cpu.use_isa(name)
            results.append(Running(prepack.packed(step), shape, 1)(ids, (3,), torch.arange(3)))
    finally:
        cpu.use_isa(before)
    # Attention sums in another order; one activation may then be rounded to another int8.
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 0.03


def test_an_out_of_range_row_index_is_an_error() -> None:
    step, shape = step_of("llama")
    with pytest.raises(RuntimeError, match="row 3 of 3"):
        Running(prepack.packed(step), shape, 1)(torch.tensor([5, 6, 7]), (3,), torch.tensor([3]))


def linear_rows(program: ExportedProgram) -> list[str]:
    """Return the number of rows of each packed linear layer, as a symbol, in order."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and "linear_" in str(n.target)]
    return [str(n.meta["val"].shape[-2]) for n in calls]


@pytest.mark.parametrize(("name", "late"), [("llama", 4), ("gpt2", 4), ("phi3", 4), ("gemma", 4)])
def test_the_last_layer_computes_only_rows_whose_logits_are_asked_for(name: str, late: int) -> None:
    plain, _ = prepack.plan_packing(step_of(name)[0], fuse_layers=False)
    plain = match.matched(plain)
    before, after = linear_rows(plain), linear_rows(picked_rows.with_rows_picked_first(plain))
    picked = before[-1]
    assert before == [*[before[0]] * (len(before) - 1), picked]
    assert after == [*[before[0]] * (len(before) - late), *[picked] * late]  # all but q, k and v


def test_a_step_without_logits_returns_none() -> None:
    step, shape = step_of("llama")
    running = Running(prepack.packed(step), shape, 1)
    assert running(torch.tensor([5, 6, 7]), (3,), torch.empty(0, dtype=torch.int64)).shape == (0, VOCABULARY)
    later = running(torch.tensor([8]), (1,), torch.tensor([0]))  # its cache has all tokens
    whole = Running(prepack.packed(step), shape, 1)(torch.tensor([5, 6, 7, 8]), (4,), torch.tensor([3]))
    assert float((later - whole).norm() / whole.norm()) < 0.03


class Picked(nn.Module):
    """Rows of a feed-forward network that are picked; `all_rows`: what else reads its rows."""

    def __init__(self, all_rows: str = "") -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 192)
        self.all_rows = all_rows

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        up = torch.nn.functional.silu(self.up(x))
        y = x + self.down(up)
        result = self.head(y[:, rows])
        return (result, {"up": up, "y": y, "": result}[self.all_rows])


@pytest.mark.parametrize(("all_rows", "late"), [("", 3), ("up", 2), ("y", 1)])
def test_values_whose_other_rows_are_read_stay_whole(all_rows: str, late: int) -> None:
    model = Picked(all_rows).eval()
    quantize_model(model, Plan(source="test", quant="int8"))
    given = torch.randn(1, 5, 64), torch.tensor([4, 0, 4])
    sizes = {"x": {1: torch.export.Dim("tokens", min=2)}, "rows": {0: torch.export.Dim("rows", min=2)}}
    program = torch.export.export(model, given, dynamic_shapes=sizes)
    plain = prepack.packed(program, fuse_layers=False)
    found = picked_rows.with_rows_picked_first(match.matched(plain))
    tokens, picked = linear_rows(plain)[0], linear_rows(plain)[-1]
    assert linear_rows(found) == [*[tokens] * (3 - late), *[picked] * late]
    for got, expected in zip(found.module()(*given), plain.module()(*given), strict=True):
        torch.testing.assert_close(got, expected)


class Activations(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_patterns_become_single_operators_with_the_same_result() -> None:
    x = torch.randn(4, 7)
    program = torch.export.export(Activations(), (x,))
    found = match.matched(program)
    assert set(targets(found)) == {"aten.gelu.default", "infer.rms_norm.default"}
    torch.testing.assert_close(found.module()(x), program.module()(x))


def test_rows_of_two_kinds_without_a_gather_are_not_fused() -> None:
    model = build("cohere2_moe", sizes=GROUPED)
    split_experts(model)
    quantize_model(model, Plan(source="test", quant="int8:weight"))
    step = capture_step(model, probe(model, page=4, kv_dtype="float32")).exported
    assert targets(prepack.packed(step))["infer.linear_experts_int8_weight_packed.default"] == 4
