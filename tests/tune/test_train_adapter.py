"""`infer tune`: the adapter's folder gives the logits of training in PEFT, in the engine and over a packed base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")

from infer import compress
from infer.cli import main
from infer.compress.packed_layers import QuantizedEmbedding
from infer.compress.packed_weight import PackedLayer
from infer.errors import BusyError, UsageError
from infer.llm.lora.adapters import Adapters
from infer.plan import Plan
from infer.reporter import Reporter
from infer.tune.adapter import train_adapter
from infer.tune.language_model import open_base
from infer.tune.settings import AdapterSettings, TrainSettings
from infer.tune.training_folder import TrainingReport
from tests.llm.test_lora import Graph, logits, merged, together
from tests.support.tiny_chats import chats, source
from tests.support.tiny_decoders import build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and peft have many to give
IDS = [5, 70, 71, 90, 101, 33]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    source(folder / "llama")
    chats(folder / "chats.jsonl")
    return folder


def tuned(home: Path, output: str, **changes: Any) -> TrainingReport:
    training = {"steps": 20, "batch": 4, "learning_rate": 0.02, "measure_every": 10}
    training |= {name: changes.pop(name) for name in list(changes) if name in TrainSettings.__struct_fields__}
    settings = {"source": str(home / "llama"), "data": str(home / "chats.jsonl"), "lora": 4, "length": 64}
    return train_adapter(
        AdapterSettings(**{**settings, **changes}), TrainSettings(**training), home / output, replace=True
    )


@pytest.fixture(scope="module")
def reports(home: Path) -> dict[str, TrainingReport]:
    """Train adapters over bases of several formats, each in the folder of its format's name."""
    return {format: tuned(home, format, base=format) for format in ("none", "nf4")}


@pytest.mark.parametrize("format", ["none", "nf4"])
def test_an_adapter_learns_the_answers(reports: dict[str, TrainingReport], format: str) -> None:
    assert reports[format].best_held_out < 0.8 * reports[format].first_held_out


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("format", ["none", "nf4"])
def test_peft_reads_the_folder_with_equal_logits(format: str, home: Path) -> None:
    from peft import PeftModel

    plain = unpacked(open_base(str(home / "llama"), format, Reporter()).model)
    before, expected = logits(plain, IDS), logits(merged(plain, home / format, 2.0), IDS)
    found = logits(PeftModel.from_pretrained(plain, home / format).eval(), IDS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float((found - before).norm()) > 0.1 * float(found.norm())


def unpacked(model: nn.Module) -> nn.Module:
    """Replace packed layers by float layers of the decoded weights, in place."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, PackedLayer):
            continue
        weight = layer.weight.detach().clone()
        rows, columns = weight.shape
        embeds = isinstance(layer, QuantizedEmbedding)
        new = nn.Embedding(rows, columns) if embeds else nn.Linear(columns, rows, bias=False)
        new.weight = nn.Parameter(weight, requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return model.eval()


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize(
    ("format", "bound"),
    [("none", 1e-3), pytest.param("nf4", 0.03, marks=pytest.mark.slow)],  # activations are rounded to int8
)
def test_the_engine_serves_the_folder_with_equal_logits(format: str, bound: float, home: Path) -> None:
    base = build("llama")
    if format != "none":
        compress.quantize_model(base, Plan(source="", quant=format))
    plain, graph = logits(base, IDS), Graph(base)
    adapters = Adapters(graph.shape.adapters)
    adapters.load("mine", home / format)
    found = together(graph, adapters, [IDS, IDS], [1, 0])
    assert distance(found[1], plain) < bound
    assert distance(found[0], trained_logits(home, format)) < bound
    assert distance(found[0], plain) > 0.1


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance of two vectors."""
    return float((found - expected).norm() / expected.norm())


def trained_logits(home: Path, format: str) -> Tensor:
    """Return the logits of the base as it was trained, with PEFT's own adapters beside the packed layers."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    from infer.tune.adapter import add_adapter

    base = open_base(str(home / "llama"), format, Reporter()).model.eval()
    wrapped = add_adapter(base, AdapterSettings(source="", data="", lora=4))
    set_peft_model_state_dict(wrapped, load_file(home / format / "adapter_model.safetensors"))
    return logits(wrapped.eval(), IDS)


@pytest.mark.usefixtures("reports")
def test_the_folder_has_what_vllm_and_peft_check(home: Path) -> None:
    folder = home / "nf4"
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "report.json", "report.html"} <= names
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["inference_mode"] is True
    assert sorted(config["target_modules"]) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert "<svg" in (folder / "report.html").read_text()
    assert not folder.with_name(f"{folder.name}.checkpoints").exists()


def test_the_command_trains_and_prints_how_it_went(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", str(home / "llama"), "--data", str(home / "chats.jsonl"), "--output", str(home / "cli")]
    options = ["--base", "none", "--lora", "2", "--steps", "2", "--batch", "2", "--length", "64"]
    assert main([*words, *options]) == 0
    shown = capsys.readouterr()
    assert "stopped" in shown.out
    assert "2 steps" in shown.out
    assert main([*words, *options]) == 6
    assert "exists" in capsys.readouterr().err


def test_ctrl_c_names_the_checkpoint_and_exits_130(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("interrupted after step 3; the checkpoint stays in here")

    monkeypatch.setattr("infer.tune.adapter.train_adapter", interrupted)
    words = [
        "tune",
        str(home / "llama"),
        "--data",
        str(home / "chats.jsonl"),
        "--output",
        str(home / "never"),
    ]
    assert main(words) == 130
    assert "the checkpoint stays in here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lora_layers": "q_porj"}, UsageError, "Did you mean q_proj"),
        ({"length": 9999}, UsageError, "the model takes 256 tokens"),
        ({"data": "nowhere"}, UsageError, "there is no file or folder nowhere"),
        ({"base": "nf5"}, UsageError, "nf5"),
    ],
)
def test_wrong_options_are_refused(
    home: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        tuned(home, "refused", **changes)
    assert not (home / "refused").exists()


def test_a_folder_that_is_no_adapter_is_never_replaced(home: Path) -> None:
    with pytest.raises(BusyError, match="has no adapter_config.json"):
        tuned(home, "llama")


def test_the_plan_is_reported_before_and_its_peak_after_the_first_step(
    reports: dict[str, TrainingReport],
) -> None:
    found = {finding.what: finding for finding in reports["nf4"].findings if finding.stage == "memory"}
    parts = ("process", "weights", "gradients", "optimizer states", "activations", "workspace")
    assert sum(found[name].value for name in parts) == found["planned peak"].value
    assert found["measured peak"].why.startswith("planned ")
    assert found["measured peak"].value < 1.5 * found["planned peak"].value


def test_plan_memory_prints_the_techniques_and_trains_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["--data", str(home / "chats.jsonl"), "--lora", "4", "--length", "64", "--plan-memory"]
    assert main(["tune", str(home / "llama"), *words, "--batch", "2"]) == 0
    shown = capsys.readouterr().out
    for name in ("as given: 2 rows", "with activation checkpointing", "micro-batch 1", "whole logits"):
        assert name in shown
