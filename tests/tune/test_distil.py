"""`infer distil`: a student learns its teacher's outputs, and its folder is a source like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from infer.cli import main
from infer.errors import NotUsableError, UsageError
from infer.load import fill, load
from infer.load.samples.read_samples import read_data
from infer.plan import Plan
from infer.tune.data.rows import SampleRows, split_rows
from infer.tune.distillation.distil import distil
from infer.tune.distillation.student import StudentShape, student_of
from infer.tune.objectives.language import LanguageObjective
from infer.tune.objectives.outputs import LayerOutputs, OutputObjective, hidden_error
from infer.tune.settings import DistilSettings, TrainSettings
from infer.tune.training_folder import TrainingReport
from tests.support.tiny_chats import chats, source

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
TEACHER = """
import torch
from torch import nn

INPUTS = {"x": "float32[batch,8]"}
OUTPUTS = ("logits",)
TASK = "classification"

class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

def build():
    torch.manual_seed(0)
    return Net(64, 4)

def small():
    torch.manual_seed(1)
    return Net(16, 4)

def wrong():
    return Net(16, 5)

def other_names():
    return nn.Linear(8, 4)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distil")
    source(folder / "llama", num_hidden_layers=4)
    chats(folder / "chats.jsonl")
    sentence_encoder(folder / "encoder")
    (folder / "texts.txt").write_text("\n".join(f"text of {i} bytes {i * i}" for i in range(40)) + "\n")
    (folder / "net.py").write_text(TEACHER)
    namespace: dict[str, Any] = {}
    exec(TEACHER, namespace)  # noqa: S102 - the module of this file
    torch.save(namespace["build"]().state_dict(), folder / "net.pt")
    np.savez(folder / "x.npz", x=np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32))
    return folder


def sentence_encoder(folder: Path) -> None:
    """Write a random encoder of bytes with mean pooling, in a folder of sentence-transformers."""
    import json

    from transformers import BertConfig, BertModel

    from tests.support.llm_artifacts import bytes_as_tokens

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(**sizes, vocab_size=300, max_position_embeddings=64))
    with torch.no_grad():
        for layer in model.encoder.modules():
            if isinstance(layer, nn.Linear):
                layer.weight *= 6  # as large as trained ones, so that a layer left out is missed
    model.save_pretrained(folder)
    bytes_as_tokens(folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def distilled(
    home: Path, output: str, teacher: str, student: str, data: str, **changes: Any
) -> TrainingReport:
    training = {"steps": 30, "batch": 8, "learning_rate": 3e-3, "measure_every": 15}
    training |= {name: changes.pop(name) for name in list(changes) if name in TrainSettings.__struct_fields__}
    settings = DistilSettings(source=str(home / teacher), student=student, data=str(home / data), **changes)
    return distil(settings, TrainSettings(**training), home / output, replace=True)


def opened(folder: Path, **plan: Any) -> nn.Module:
    loaded = load(Plan(source=str(folder), data="random", **plan))
    fill(loaded)
    assert loaded.module is not None
    return loaded.module.eval()


def test_a_language_model_of_half_the_layers_learns_its_teacher(home: Path) -> None:
    report = distilled(home, "half", "llama", "half", "chats.jsonl", length=32, hard=0.1, held_out=0.2)
    assert report.first_held_out is not None
    assert report.best_held_out is not None
    assert report.best_held_out < 0.7 * report.first_held_out
    student = opened(home / "half")
    assert student.model.config.num_hidden_layers == 2
    ids = torch.arange(60, 80)[None]
    teacher = opened(home / "llama")
    with torch.no_grad():
        logs = [each(ids).log_softmax(-1) for each in (teacher, student)]
    divergence = float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
    assert divergence < 10 * report.best_held_out  # of other text, by the saved weights
    assert "infer distil" in report.command
    assert "--student half" in report.command


def test_a_sentence_encoder_keeps_its_pooling(home: Path) -> None:
    report = distilled(home, "small", "encoder", "layers:2", "texts.txt", held_out=0.2)
    assert report.first_held_out is not None
    assert report.best_held_out is not None
    assert report.best_held_out < 0.5 * report.first_held_out
    loaded = load(Plan(source=str(home / "encoder"), data="random"))
    samples, _, _ = read_data(str(home / "texts.txt"), loaded)
    with torch.no_grad():
        wanted, got = (opened(home / name)(*samples.values()) for name in ("encoder", "small"))
    error = (got - wanted).square().sum(-1).mean() / wanted.square().sum(-1).mean()
    assert float(error) < 2 * report.best_held_out


def test_a_module_of_the_users_learns_another_one(home: Path) -> None:
    report = distilled(
        home,
        "net",
        "net.pt",
        f"{home}/net.py:small",
        "x.npz",
        model=f"{home}/net.py:build",
        steps=120,
        batch=64,
    )
    assert report.first_held_out is not None
    assert report.best_held_out is not None
    assert report.best_held_out < 0.3 * report.first_held_out
    student = opened(home / "net" / "student.pt", model=f"{home}/net.py:small")
    assert student.up.out_features == 16


def test_inputs_and_outputs_that_differ_are_refused_before_training(home: Path) -> None:
    with pytest.raises(UsageError, match=r"logits.*\[1, 4\] of the teacher, \[1, 5\] of the student"):
        distilled(home, "no", "net.pt", f"{home}/net.py:wrong", "x.npz", model=f"{home}/net.py:build")
    with pytest.raises(UsageError, match=r"has no input named 'x'.*takes: input"):
        distilled(home, "no", "net.pt", f"{home}/net.py:other_names", "x.npz", model=f"{home}/net.py:build")
    assert not (home / "no").exists()


def test_a_student_of_another_kind_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="a model of embedding, the teacher of text-generation"):
        distilled(home, "no", "llama", str(home / "encoder"), "chats.jsonl")
    with pytest.raises(UsageError, match="made of models of transformers"):
        distilled(home, "no", "net.pt", "half", "x.npz", model=f"{home}/net.py:build")
    with pytest.raises(UsageError, match="--hard|next token"):
        distilled(home, "no", "encoder", "half", "texts.txt", hard=0.5)


def test_the_command_says_what_to_do_next(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "distil",
        str(home / "net.pt"),
        "--model",
        f"{home}/net.py:build",
        "--student",
        f"{home}/net.py:small",
    ]
    words += ["--data", str(home / "x.npz"), "-o", str(home / "cli"), "--steps", "2"]
    assert main(words) == 0
    assert "infer optimize" in capsys.readouterr().out
    assert main(words) == 6
    assert "exists" in capsys.readouterr().err


class Logits(nn.Module):
    """A model that gives one tensor whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.value[: len(x)]


def test_the_divergence_of_outputs_is_that_of_torch() -> None:
    torch.manual_seed(0)
    own, wanted = torch.randn(3, 5), torch.randn(3, 5)
    wanted[0, 0] = -torch.inf
    found = OutputObjective(Logits(own), Logits(wanted), ["logits"], "classification", temperature=2.0)
    loss, terms = found.loss({"x": torch.zeros(3, 1)})
    expected = nn.functional.kl_div((own / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="sum")
    assert int(terms) == 3
    torch.testing.assert_close(loss, expected * 4)


def test_a_measure_keeps_no_hidden_states() -> None:
    own, wanted = nn.Linear(4, 3), nn.Linear(4, 3)
    layers = LayerOutputs([own]), LayerOutputs([wanted])
    found = OutputObjective(own, wanted, ["logits"], "classification", hidden=1.0, layers=([own], [wanted]))
    found.measure({"input": torch.randn(2, 4)})
    assert [len(each.taken()) for each in layers] == [1, 1], "both layers ran"
    assert found.compared._own.taken() == found.compared._theirs.taken() == []


def test_equal_outputs_have_no_loss_and_padding_does_not_count() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(2, 4, 3)
    own = wanted.clone()
    own[0, 2:] += 100  # padding
    found = OutputObjective(Logits(own), Logits(wanted), ["logits"], "token-classification")
    batch = {"x": torch.zeros(2, 1), "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])}
    loss, terms = found.loss(batch)
    assert int(terms) == 6
    assert float(loss) < 1e-6


def test_hidden_states_are_compared_over_real_tokens() -> None:
    wanted = torch.ones(1, 3, 2)
    own = torch.tensor([[[1.0, 1.0], [2.0, 1.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    assert float(hidden_error([own], [wanted], mask)) == pytest.approx(0.25)
    assert float(hidden_error([wanted], [wanted], None)) == 0


def test_chunked_and_whole_logits_give_one_loss(home: Path) -> None:
    models = [opened(home / "llama").model.requires_grad_(True) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    objective = LanguageObjective(*models, temperature=1.5, hard=0.3)
    assert objective.student.head is not None
    assert objective.teacher.head is not None
    ids = torch.arange(40, 60)[None]
    labels = ids + 1
    labels[0, :4] = -100
    batch = {"input_ids": ids, "position_ids": torch.arange(20)[None], "labels": labels}
    chunked, terms = objective.loss(batch)
    objective.student.head = None
    whole, same = objective.loss(batch)
    assert int(terms) == int(same) == 16
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)


def test_held_out_rows_are_not_trained_on() -> None:
    values = torch.arange(20.0)[:, None].repeat(2, 1)  # each row twice
    rows, held = split_rows({"x": values}, 0.1, 0)
    assert held is not None
    taken, aside = set(rows.tensors["x"].flatten().tolist()), set(held.tensors["x"].flatten().tolist())
    assert aside
    assert not taken & aside
    assert split_rows({"x": values[:1]}, 0.5, 0)[1] is None


def test_a_batch_has_no_column_of_padding_alone() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    rows = SampleRows({"input_ids": mask * 7, "attention_mask": mask})
    assert rows.batch([0, 1])["input_ids"].shape == (2, 2)
    assert rows.batch([2])["input_ids"].shape == (1, 4)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": 40}
    with pytest.raises(NotUsableError, match="an encoder and a decoder"):
        student_of(T5ForConditionalGeneration(T5Config(**sizes)), StudentShape(layers=0.5))
