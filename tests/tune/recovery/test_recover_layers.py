"""Recovery layer by layer: the memory holds the states of one layer, and every layer comes nearer to its original."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.errors import NotUsableError
from infer.graph.program import flatten
from infer.plan import Plan
from infer.tune.objectives.outputs import token_errors
from infer.tune.recovery import recover_layers as layers_stage
from infer.tune.recovery import recovery_settings
from infer.tune.recovery.layer_calls import LayerCall, SharedTensors, layer_calls
from infer.tune.recovery.objectives import LayerObjective, layer_lists
from infer.tune.recovery.recover import recover
from infer.tune.recovery.recover_layers import LayerChain
from infer.tune.recovery.recovery_settings import RecoveryBudget
from tests.support.packed_tensors import packed

pytest.importorskip("accelerate")
WIDTH, TOKENS, WORDS = 64, 12, 96
TASK = "text-generation"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A language model of three blocks; `calls` says in which order they run."""

    def __init__(self, calls: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.head, self.calls = nn.Linear(WIDTH, WORDS, bias=False), calls

    def forward(self, input_ids: Tensor) -> Tensor:
        x, scale = self.embed(input_ids), torch.ones(1, 1, 1)
        for index in self.calls:
            x = self.layers[index](x, scale=scale)
        return self.head(x)


def pair(quant: str = "cluster:2", calls: tuple[int, ...] = (0, 1, 2)) -> tuple[Stack, Stack]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = Stack(calls).eval()
    student = copy.deepcopy(teacher)
    compress.quantize_model(student, Plan(source="m.pt", quant=quant))
    return teacher, student


def rows(count: int = 512) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(WORDS, (count, TOKENS), generator=torch.Generator().manual_seed(5))}


def hidden_error(student: Stack, teacher: Stack) -> float:
    """Return the error of the hidden states behind the last layer on rows that were not trained on."""
    ids = torch.randint(WORDS, (32, TOKENS), generator=torch.Generator().manual_seed(9))
    states: list[Tensor] = []
    for model in (student, teacher):
        with model.layers[-1].register_forward_hook(lambda *given: states.append(given[-1])), torch.no_grad():
            model(ids)
    return float(token_errors(*states, None).mean())


def budget(steps: int) -> RecoveryBudget:
    return RecoveryBudget(terms=int(steps * 16 * TOKENS / recovery_settings.LAYERS_SHARE))


def room_for_one_layer(monkeypatch: pytest.MonkeyPatch, student: Stack) -> None:
    free = recovery_settings.CODE_BYTES * layers_stage.num_codes(student) - 1
    monkeypatch.setattr(recovery_settings.memory, "memory_available", lambda device: free)


def test_codes_without_room_for_all_are_trained_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = pair()
    given = {name: parameter.clone() for name, parameter in teacher.named_parameters()}
    before, codes = hidden_error(student, teacher), packed(student)
    room_for_one_layer(monkeypatch, student)
    found = recover(student, teacher, rows(), ["logits"], TASK, budget(80), tmp_path)
    assert hidden_error(student, teacher) < 0.6 * before
    after = packed(student)
    changed = {name for name in codes if name.endswith("codes") and not torch.equal(codes[name], after[name])}
    assert changed == {f"layers.{i}.{part}.packed.codes" for i in range(3) for part in ("up", "down")}
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {
        n: (t.dtype, t.shape) for n, t in codes.items()
    }
    assert all(torch.equal(p, given[n]) for n, p in teacher.named_parameters()), "the original is not changed"
    assert not any(parameter.requires_grad for parameter in student.parameters())
    said = next(finding for finding in found if finding.what == "codes trained")
    assert said.value == 3 * 4 * WIDTH * WIDTH
    assert "3 layers" in said.why
    assert "GB are free" in said.why


@pytest.mark.parametrize(
    ("by_layer", "codes"), [(True, 12 * WIDTH * WIDTH), (False, 12 * WIDTH * WIDTH + 2 * WORDS * WIDTH)]
)
def test_codes_are_trained_layer_by_layer_or_together_as_asked(
    by_layer: bool, codes: int, tmp_path: Path
) -> None:
    teacher, student = pair()
    found = recover(student, teacher, rows(), ["logits"], TASK, budget(80), tmp_path, by_layer=by_layer)
    assert [finding.value for finding in found if finding.what == "codes trained"] == [codes]


def test_layers_that_do_not_help_the_model_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = pair()
    before = packed(student)
    norms = {name: p.clone() for name, p in student.named_parameters()}
    room_for_one_layer(monkeypatch, student)
    measures = iter([1.0, 2.0])
    monkeypatch.setattr(layers_stage, "_measure", lambda task: next(measures))
    monkeypatch.setattr(recovery_settings, "RATE", 0.0)  # of the whole model afterwards
    found = recover(student, teacher, rows(), ["logits"], TASK, budget(80), tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in packed(student).items())
    assert all(torch.equal(p, norms[name]) for name, p in student.named_parameters())
    said = next(finding for finding in found if finding.what == "codes trained")
    assert said.value == 0
    assert "did not help: 1 to 2" in said.why


@pytest.mark.parametrize(
    ("calls", "reason"),
    [((0, 0, 1, 2), "more than once"), ((1, 0, 2), "out of order"), ((0, 1), "only 2 are called")],
)
def test_layers_that_are_no_chain_are_named_and_the_rest_is_trained(
    calls: tuple[int, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = pair(calls=calls)
    codes = {name: tensor for name, tensor in packed(student).items() if name.endswith("codes")}
    room_for_one_layer(monkeypatch, student)
    found = recover(student, teacher, rows(), ["logits"], TASK, budget(80), tmp_path)
    said = {finding.what: finding for finding in found}
    assert (said["codes trained"].value, reason in said["codes trained"].why) == (0, True)
    assert float(said["after"].value) < float(said["before"].value)  # type: ignore[arg-type]
    assert all(torch.equal(packed(student)[name], tensor) for name, tensor in codes.items())


def test_a_layer_without_room_for_its_states_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = pair()
    monkeypatch.setattr(recovery_settings.memory, "memory_available", lambda device: 1000)
    found = recover(student, teacher, rows(), ["logits"], TASK, budget(80), tmp_path)
    said = next(finding for finding in found if finding.what == "codes trained")
    assert said.value == 0
    assert "states of the largest layer" in said.why


def made(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": WORDS}
    more: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**common, **more),
        "gemma2": lambda: transformers.Gemma2Config(**common, **more, sliding_window=4),
        "bert": lambda: transformers.BertConfig(**common, intermediate_size=48),
        "opt": lambda: transformers.OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=32),
        "t5": lambda: transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=WORDS
        ),
    }
    config = configs[name]()
    config.use_cache = False
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if name == "t5":
            return transformers.T5EncoderModel(config).eval()
        kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
        return kind.from_config(config).eval()


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "opt", "t5"])
def test_layers_run_alone_as_in_the_model(name: str) -> None:
    teacher, student = made(name), made(name)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.01)
    batches = []
    for seed, length in enumerate((9, 9, 6)):
        ids = torch.randint(2, WORDS, (2, length), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    lists = layer_lists(student, teacher)
    assert [len(names) for names in lists] == [3]
    chain = LayerChain(student, teacher, lists[0], batches, room=1e9)
    for index, name in enumerate(lists[0]):
        chain.set_targets(index)
        kept = chain.batches(index, 0, 3)
        for number, batch in enumerate(batches):
            given = kept.batch([number])
            own, target = (_outputs_of(model, name, batch) for model in (student, teacher))
            assert torch.allclose(given["target"], target, atol=1e-5)
            got = LayerCall(given["call"]).run(student.get_submodule(name), given["hidden"])
            assert torch.allclose(got, own, atol=1e-5)
            assert torch.equal(given["mask"], batch["attention_mask"].bool())
        chain.advance(index)


@torch.no_grad()
def _outputs_of(model: nn.Module, name: str, batch: dict[str, Tensor]) -> Tensor:
    found: list[Any] = []
    with model.get_submodule(name).register_forward_hook(lambda *given: found.append(given[-1])):
        model(**batch)
    return found[0] if isinstance(found[0], Tensor) else found[0][0]


def test_batches_end_where_memory_has_no_room() -> None:
    teacher, student = pair()
    batches = [{"input_ids": rows(16)["input_ids"]} for _ in range(5)]
    one = 3 * 16 * TOKENS * WIDTH * 4
    assert len(LayerChain(student, teacher, layer_lists(student, teacher)[0], batches, 2 * one)) == 3


def test_a_layer_that_gets_a_cache_is_refused() -> None:
    class Cached(Stack):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x, scale=object())  # type: ignore[arg-type]
            return x

    model = Cached()
    with pytest.raises(NotUsableError, match="gets a object as 'scale'"):
        layer_calls(model, list(model.layers), rows(2), SharedTensors())


def test_hooks_are_gone_after_recording() -> None:
    teacher, _ = pair(calls=(1, 0, 2))
    with pytest.raises(NotUsableError):
        layer_calls(teacher, list(teacher.layers), rows(2), SharedTensors())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in teacher.layers)
    assert flatten(teacher(**rows(2)))[0].shape == (2, TOKENS, WORDS)


def test_equal_tensors_of_many_calls_are_kept_once() -> None:
    shared = SharedTensors()
    first, second = shared.share({"mask": torch.ones(2, 3)}), shared.share({"mask": torch.ones(2, 3)})
    assert first["mask"] is second["mask"]
    assert shared.share(torch.zeros(2, 3)) is not first["mask"]


def test_the_error_of_a_layer_counts_real_tokens_by_their_size() -> None:
    target = torch.tensor([[[2.0, 0.0], [0.0, 4.0], [1.0, 1.0]]])
    got = target + torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    assert token_errors(got, target, mask).tolist() == [0.25, 0.0625]


def test_precision_of_a_layer_follows_its_error() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    hidden = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    call = {"args": (None,), "kwargs": {}, "place": 0}
    exact = layer(hidden).detach()
    for target, wanted in ((exact * 1.2, "bfloat16"), (exact * 1.001, "float32")):
        batch = {"call": call, "hidden": hidden, "target": target, "mask": None}
        assert LayerObjective(layer).precision(batch, 0.05) == wanted
