"""LoRA adapters: the captured step with them gives what merged weights give, side by side in one batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infer import compress
from infer.compress.packed_layers import QuantizedLinear
from infer.errors import BusyError, InferError, SourceError, UsageError
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.lora.adapters import Adapters
from infer.llm.step.full_sequence_runner import FullSequenceRunner, attention_inputs
from infer.llm.step.paged_step import capture_step, with_adapters
from infer.llm.step.probe import probe
from infer.llm.step.step_shape import StepShape
from infer.options.values import parse_adapters as parse
from infer.plan import Plan
from tests.support.tiny_decoders import VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
TARGETS = {
    "llama": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "gemma2": ("o_proj", "gate_proj"),
}


class Graph:
    """The exported step of a model with room for two adapters of rank 4."""

    def __init__(self, model: nn.Module) -> None:
        shape = probe(model, page=4, kv_dtype="float32")
        self.shape = with_adapters(model, shape, 2, 4)
        graph = capture_step(model, self.shape)
        self.inputs, self._model_runner, self.constants = (
            graph.inputs,
            graph.callable(),
            graph.exported.constants,
        )

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": self._model_runner(**inputs)[0]}

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def llama() -> Graph:
    return Graph(build("llama"))


def sizes(model: nn.Module, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the layers by name."""
    named = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] in targets}
    return {
        n: (m.weight.shape[0], m.weight.shape[1]) if type(m).__name__ == "Conv1D" else (m.in_features, m.out_features)
        for n, m in named.items()
    }  # fmt: skip


def peft(
    folder: Path, layers: Mapping[str, tuple[int, int]], *, seed: int = 0, rank: int = 3, **config: Any
) -> Path:
    """Write an adapter as PEFT saves it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in layers.items():
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "use_dora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: nn.Module, folder: Path, scale: float) -> nn.Module:
    """Return a copy of the model with the adapter added to its weights."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    other = copy.deepcopy(model)
    modules = dict(other.named_modules())
    for key in tensors:
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        weight = modules[name].weight
        with torch.no_grad():
            weight += delta.T if type(modules[name]).__name__ == "Conv1D" else delta
    return other


def logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float()


def together(graph: Graph, adapters: Adapters, prompts: list[list[int]], slots: list[int]) -> Tensor:
    """Return the logits after each prompt, in one call of the step."""
    shape, counts = graph.shape, [len(prompt) for prompt in prompts]
    table = torch.arange(len(prompts) * 8, dtype=torch.int32).reshape(len(prompts), 8)
    named = attention_inputs(shape, [0] * len(prompts), counts, table)
    rows = torch.tensor(counts).cumsum(0) - 1
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    named |= {"token_ids": ids, "logit_rows": rows, "kv_cache": shape.new_cache(len(prompts) * 8)}
    return graph.run(named | adapters.inputs(slots, counts))["logits"]


@pytest.mark.parametrize("name", TARGETS)
def test_two_adapters_and_none_in_one_batch_equal_merged_weights(name: str, tmp_path: Path) -> None:
    model = build(name)
    graph = Graph(model)
    assert graph.shape.adapters is not None
    adapters = Adapters(graph.shape.adapters)
    layers = sizes(model, TARGETS[name])
    one = peft(tmp_path / "one", layers, seed=1)
    two = peft(tmp_path / "two", dict(list(layers.items())[:2]), seed=2, rank=4, use_rslora=True)
    adapters.load("one", one)
    adapters.load("two", two)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [5, 6, 7], [3, 4]]
    found = together(graph, adapters, prompts, [1, 0, 2, 1])
    models = [merged(model, one, 2.0), model, merged(model, two, 3.0), merged(model, one, 2.0)]
    expected = torch.stack([logits(m, p) for m, p in zip(models, prompts, strict=True)])
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert (expected[0] - expected[2]).abs().max() > 1e-2


def test_without_an_adapter_the_logits_are_those_of_a_step_without_room(llama: Graph) -> None:
    model, ids = build("llama"), torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    plain = probe(model, page=4, kv_dtype="float32")
    call = capture_step(model, plain).callable()

    class Plain:
        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"logits": call(**inputs)[0]}

    expected = FullSequenceRunner(Plain(), plain).run({"input_ids": ids})["logits"]
    assert torch.equal(FullSequenceRunner(llama, llama.shape).run({"input_ids": ids})["logits"], expected)


def test_an_adapter_works_over_a_quantized_base(tmp_path: Path) -> None:
    base, tuned = build("llama"), build("llama")
    folder = peft(tmp_path / "one", sizes(base, TARGETS["llama"]))
    for model in (base, tuned):
        compress.quantize_model(model, Plan(source="x", quant="int8"))
    adapters_of = {name: module for name, module in tuned.named_modules() if name.endswith(TARGETS["llama"])}
    assert any(isinstance(module, QuantizedLinear) for module in adapters_of.values())
    graph = Graph(base)
    assert graph.shape.adapters is not None
    adapters = Adapters(graph.shape.adapters)
    adapters.load("one", folder)
    from infer.llm.lora.adapters import read

    for name, (down, up) in read(folder, graph.shape.adapters).items():

        def add(_: nn.Module, args: Any, output: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
            return output + args[0] @ down.T @ up.T

        adapters_of[name].register_forward_hook(add)
    found = together(graph, adapters, [[5, 6, 7], [5, 6, 7]], [1, 0])
    assert torch.allclose(found[0], logits(tuned, [5, 6, 7]), atol=1e-3)
    assert torch.allclose(found[1], logits(base, [5, 6, 7]), atol=1e-3)


def test_an_adapter_of_large_weights_affects_its_sequence_only(llama: Graph, tmp_path: Path) -> None:
    assert llama.shape.adapters is not None
    adapters = Adapters(llama.shape.adapters)
    before = together(llama, adapters, [[5, 6, 7]], [0])
    adapters.load("wild", peft(tmp_path / "wild", sizes(build("llama"), ("q_proj",))))
    for site in llama.shape.adapters.sites:
        llama.shape.adapters.parts(adapters.weights, site)[0].mul_(3e38)
    assert torch.equal(together(llama, adapters, [[5, 6, 7]], [0]), before)


def engine(graph: Graph, adapters: Adapters) -> Engine:
    size = 256 * graph.shape.layers * graph.shape.page_bytes
    return Engine(
        graph,
        graph.shape,
        tokenizer=None,
        eos_ids=[],
        kv_bytes=size,
        limits=EngineLimits(),
        adapters=adapters,
    )


def finish(running: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while not running.idle:
        for output in running.step():
            assert output.finish != "error", output.stopped_by
            found.setdefault(output.id, []).extend(output.token_ids)
    return found


def ask(name: str, adapter: str | None, tokens: int = 6) -> Request:
    prompt = [(7 * i) % (VOCABULARY - 3) + 3 for i in range(20)]
    return Request(
        id=name, prompt=prompt, adapter=adapter, sampling=Sampling(temperature=0, max_tokens=tokens)
    )


@pytest.fixture
def loaded(llama: Graph, tmp_path: Path) -> Adapters:
    assert llama.shape.adapters is not None
    adapters = Adapters(llama.shape.adapters)
    layers = sizes(build("llama"), TARGETS["llama"])
    for seed, name in ((1, "one"), (2, "two")):
        adapters.load(name, peft(tmp_path / name, layers, seed=seed, lora_alpha=12))
    return adapters


def test_requests_of_different_adapters_run_together_as_they_run_alone(
    llama: Graph, loaded: Adapters
) -> None:
    alone: dict[str, list[int]] = {}
    for name, adapter in (("a", "one"), ("b", None), ("c", "two")):
        running = engine(llama, loaded)
        running.submit(ask(name, adapter))
        alone |= finish(running)
    running = engine(llama, loaded)
    for name, adapter in (("a", "one"), ("b", None), ("c", "two")):
        running.submit(ask(name, adapter))
    assert finish(running) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3


def test_pages_are_not_shared_between_adapters_or_reloads_of_a_name(
    llama: Graph, loaded: Adapters, tmp_path: Path
) -> None:
    running = engine(llama, loaded)
    running.submit(ask("a", "one"))
    first = finish(running)["a"]
    loaded.unload("one")
    loaded.load(
        "one", peft(tmp_path / "other", sizes(build("llama"), TARGETS["llama"]), seed=9, lora_alpha=12)
    )
    running.submit(ask("b", "one"))
    again = finish(running)["b"]
    fresh = engine(llama, loaded)
    fresh.submit(ask("c", "one"))
    assert finish(fresh)["c"] == again != first
    hits = running.scheduler.prefix_hits
    running.submit(ask("d", "two"))
    finish(running)
    assert running.scheduler.prefix_hits == hits
    running.submit(ask("e", "two"))
    finish(running)
    assert running.scheduler.prefix_hits > hits


def test_an_adapter_in_use_is_not_unloaded(llama: Graph, loaded: Adapters) -> None:
    running = engine(llama, loaded)
    running.submit(ask("a", "one", tokens=50))
    running.submit(ask("b", "one"))
    running.step()
    with pytest.raises(BusyError, match="2 requests"):
        loaded.unload("one")
    running.cancel("a")
    finish(running)
    loaded.unload("one")
    assert loaded.names == ["two"]
    assert not loaded.weights.view(-1)[: 4 * 64].any()
    with pytest.raises(UsageError, match="no adapter named 'one'"):
        running.submit(ask("c", "one"))


def test_a_model_without_adapter_slots_refuses_adapters() -> None:
    model = build("llama")
    shape = probe(model, page=4, kv_dtype="float32")
    running = Engine(model, shape, tokenizer=None, eos_ids=[], kv_bytes=64 * shape.layers * shape.page_bytes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes no adapters"):
        running.submit(ask("a", "one"))


def test_adapter_slots_and_names_are_unique(loaded: Adapters, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with pytest.raises(BusyError, match="is loaded"):
        loaded.load("one", folder)
    with pytest.raises(BusyError, match="all 2 slots"):
        loaded.load("three", folder)
    for name in ("", "../one", "a b", "x" * 200):
        with pytest.raises(UsageError):
            loaded.load(name, folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": 1e39}, "<= 1e\\+38"),
    ],
)
def test_a_configuration_that_means_more_than_lora_is_refused(
    llama: Graph, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    assert llama.shape.adapters is not None
    folder = peft(tmp_path / "x", sizes(build("llama"), ("q_proj",)), **config)
    with pytest.raises(SourceError, match=said):
        Adapters(llama.shape.adapters).load("x", folder)


def test_adapter_weights_that_do_not_fit_are_refused_without_effect(llama: Graph, tmp_path: Path) -> None:
    assert llama.shape.adapters is not None
    adapters = Adapters(llama.shape.adapters)
    name, size = next(iter(sizes(build("llama"), ("q_proj",)).items()))
    cases: dict[str, tuple[dict[str, tuple[int, int]], int, str]] = {
        "rank": ({name: size}, 5, "rank 5, but the slots have 4"),
        "shape": ({name: (size[0] + 1, size[1])}, 2, "expected"),
        "layer": ({"model.layers.7.self_attn.q_proj": size}, 2, "takes no adapter at 'model.layers.7"),
        "head": ({"lm_head": (64, VOCABULARY)}, 2, "takes no adapter at 'lm_head'"),
    }
    for case, (layers, rank, said) in cases.items():
        with pytest.raises(SourceError, match=said):
            adapters.load("x", peft(tmp_path / case, layers, rank=rank))
    good = peft(tmp_path / "good", {name: size})
    path = good / "adapter_model.safetensors"
    key = f"base_model.model.{name}.lora_"
    for tensors, said in (
        ({f"{key}A.weight": torch.ones(2, size[0])}, "got lora_A only"),
        ({f"{key}embedding_A": torch.ones(2, size[0])}, "not a LoRA weight"),
        (
            {f"{key}A.weight": torch.full((3, size[0]), torch.inf), f"{key}B.weight": torch.ones(size[1], 3)},
            "finite",
        ),
        ({}, "no LoRA weights"),
    ):
        save_file(tensors, path)
        with pytest.raises(SourceError, match=said):
            adapters.load("x", good)
    path.write_bytes(b"not safetensors")
    with pytest.raises(SourceError, match="not a safetensors file"):
        adapters.load("x", good)
    path.rename(good / "adapter_model.bin")
    with pytest.raises(SourceError, match=r"no adapter_model\.safetensors"):
        adapters.load("x", good)
    (good / "adapter_config.json").unlink()
    with pytest.raises(InferError, match=r"no adapter_config\.json"):
        adapters.load("x", good)
    assert not adapters.names
    assert not adapters.weights.any()


def test_slots_and_rank_are_read_from_the_option() -> None:
    assert parse("4") == (4, 16)
    assert parse("2:64") == (2, 64)
    for wrong in ("", "x", "0", "4:", "4:0", "65", "4:1024", "-1"):
        with pytest.raises(UsageError):
            parse(wrong)


def test_the_shape_with_its_layers_comes_back_from_a_manifest(llama: Graph) -> None:
    import msgspec

    written = msgspec.json.decode(msgspec.json.encode(llama.shape))
    assert msgspec.convert(written, StepShape) == llama.shape
    assert [spec.name for spec in llama.inputs][-2:] == ["adapter_index", "adapter_weights"]


def test_a_step_with_adapters_holds_no_constant_tensors(llama: Graph) -> None:
    """Only weights of the model have a place in an artifact."""
    assert not [name for name in llama.constants if "_tensor_constant" in name or "lifted" in name]
