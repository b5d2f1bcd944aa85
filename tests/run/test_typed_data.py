"""Code decides on typed results, so that labels may change; the source is opened, and its data tokenized, once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Plan
from infer.load import open_model
from infer.load.samples import read_samples, text_samples
from infer.load.sources import huggingface, python_sources, state_dict_source, user_module
from infer.reporter import Reporter
from infer.run import stages
from tests.support.tiny_decoders import VOCABULARY, build

MODELS = Path(__file__).resolve().parents[2] / "models"
# Every `Finding` made in this process gets other labels: before any other module of infer has seen the class.
OPTIMIZE = """
import msgspec
import infer.spec

class Renamed(infer.spec.Finding, frozen=True):
    def __post_init__(self):
        for name in ("what", "unit", "why"):
            msgspec.structs.force_setattr(self, name, getattr(self, name)[::-1] + "?")

infer.spec.Finding = Renamed
from pathlib import Path
from infer import Plan
from infer.run import stages
from infer.report import document
from infer.report.rendering import html
from bench.shared.unmeasured_memory import skip_memory

plan = Plan(
    source="{models}/digits.pt", model="{models}/digits.py:build", allow_slower=True, batches=(), backend="ort",
    dtype="float32", device="cpu", **{asked},
)
skip_memory()
stages.optimize(plan, Path("{output}"))
report = document.decode(Path("{output}", "report.json").read_bytes())
html.render_html(report)
assert report.findings
assert all(finding.what.endswith("?") for finding in report.findings)
"""
# Sensitive layers leave this format until the error is as small; one layer is the user's.
RISING: dict[str, Any] = {"quant": "cluster:2", "max_error": 0.03, "layers": {"blocks.1.down": "int8"}}
# Of the report: all that code decides on, without times and this machine's memory.
DECIDED = (
    "headline",
    "passed",
    "failure",
    "backend",
    "decodes",
    "precision",
    "task",
    "original_size",
    "limitations",
)


def decided(folder: Path) -> dict[str, Any]:
    report, manifest = (json.loads((folder / f"{name}.json").read_bytes()) for name in ("report", "manifest"))
    files = {name: sha for name, sha in manifest["files"].items() if not name.startswith("report.")}
    rows = {
        "fidelity": ("subject", "metric", "value", "limit", "ok"),
        "layers": ("name", "format", "bits", "weight_error", "effect", "by"),
        "tried": ("name", "outcome"),
    }
    tables = {name: [{k: row[k] for k in keys} for row in report[name]] for name, keys in rows.items()}
    same = {name: manifest[name] for name in ("plan", "verdict", "meta", "scores_only", "samples_from")}
    return {"files": files, **tables, **{name: report[name] for name in DECIDED}, **same}


def counted(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> Counter[str]:
    """Count the calls of functions, by name."""
    calls: Counter[str] = Counter()
    for owner, name in functions:
        monkeypatch.setattr(owner, name, partial(_count, calls, name, getattr(owner, name)))
    return calls


def _count(calls: Counter[str], name: str, call: Any, *args: Any, **named: Any) -> Any:
    calls[name] += 1
    return call(*args, **named)


@dataclass
class RaisedArtifact:
    """An artifact whose sensitive layers rose, with what its run called and the steps that it told."""

    folder: Path
    calls: Counter[str]
    steps: list[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RaisedArtifact:
    class Steps(Reporter):
        def step(self, name: str, detail: str = "") -> None:
            steps.append(name)

    steps: list[str] = []
    folder = tmp_path_factory.mktemp("plain") / "digits.infer"
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(
            patch,
            (open_model, "identify"),
            (state_dict_source, "open_checkpoint"),
            (user_module, "import_file"),
            (read_samples, "with_samples"),
        )
        plan = Plan(
            source=str(MODELS / "digits.pt"), model=f"{MODELS / 'digits.py'}:build", allow_slower=True, batches=(),
            backend="ort", dtype="float32", device="cpu", **RISING,
        )  # fmt: skip
        stages.optimize(plan, folder, reporter=Steps())
    return RaisedArtifact(folder, calls, steps)


def test_no_decision_depends_on_display_labels(
    made: RaisedArtifact, tmp_path: Path, run_python: Callable[[str], str]
) -> None:
    output = tmp_path / "digits.infer"
    run_python(OPTIMIZE.format(models=MODELS, output=output, asked=RISING))
    plain, renamed = decided(made.folder), decided(output)
    assert {"pin", "sensitivity", "refused"} <= {row["by"] for row in plain["layers"]}
    assert renamed == plain


def test_the_source_is_opened_once_even_if_layers_are_raised(made: RaisedArtifact) -> None:
    assert made.steps.count("compress") > 1
    assert made.calls == {"identify": 1, "open_checkpoint": 1, "import_file": 1, "with_samples": 1}


def test_the_text_of_a_language_model_is_tokenized_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    build("llama").save_pretrained(tmp_path)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "samples.txt").write_text(" ".join(f"w{i % VOCABULARY}" for i in range(1024)))
    calls = counted(
        monkeypatch, (text_samples, "tokenize"), (huggingface, "read_json"), (huggingface, "open_weights")
    )
    loaded, run = stages.load(
        stages.resolve(Plan(source=str(tmp_path), quant="nf4", device="cpu", task="score"))
    )
    opened = dict(calls)
    original = stages.capture_original(run.plan, loaded, Reporter())
    for _ in range(2):
        small = stages.compress_model(run.plan, original)
    assert small.layers
    assert (calls["tokenize"], calls["open_weights"]) == (1, 1)
    assert calls == opened, "compressing reads the folder again"


def test_a_copy_of_a_pickled_model_shares_weights_and_nothing_else() -> None:
    model = torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)), torch.nn.BatchNorm1d(4)
    )
    first = python_sources.copy_structure(model)
    first.to(torch.bfloat16)
    first[1].running_mean.fill_(7.0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model[1].running_mean.any()
    again = python_sources.copy_structure(model)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
        assert mine is not theirs
