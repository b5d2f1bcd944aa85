"""Mixed precision down the whole street: budgets hold, pins are kept, any artifact can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from infer import Plan
from infer.artifact.store import Manifest
from infer.cli import main, optimize
from infer.errors import GateError, UsageError
from infer.fidelity.thresholds import limits, precision
from infer.options import values
from infer.report import document, sections
from infer.report.rendering import html
from infer.reporter import Reporter
from infer.run import stages
from infer.spec import Finding, LayerChoice

MODELS = Path(__file__).resolve().parents[2] / "models"
DIGITS = Plan(
    source=str(MODELS / "digits.pt"), model=f"{MODELS / 'digits.py'}:build", allow_slower=True, batches=(),
    backend="eager", dtype="float32", device="cpu",
)  # fmt: skip
WEIGHTS = "weights/model.safetensors"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> stages.Outcome:
    plan = DIGITS.with_(bits=4.6, layers={"blocks.1.down": "int8"})
    return stages.optimize(plan, tmp_path_factory.mktemp("mixed") / "digits.infer")


def bits(manifest: Manifest) -> float:
    found = {f.what: f.value for f in manifest.findings if f.stage == "compress"}
    return found["bits per quantized weight"]


def test_a_published_artifact_stays_within_its_budget(mixed: stages.Outcome) -> None:
    assert bits(mixed.manifest) <= 4.6
    formats = {row.name: row.format for row in mixed.manifest.layers}
    assert formats["blocks.1.down"] == "int8"
    assert len(set(formats.values()) - {"float"}) >= 2
    assert formats["stem"] == "float"


def test_every_layer_reports_format_bits_cost_and_reason(mixed: stages.Outcome) -> None:
    rows = {row.name: row for row in mixed.manifest.layers}
    assert rows["blocks.1.down"].why == "pinned"
    assert rows["stem"].why == "weight has 9 columns; cluster blocks are 64 wide"
    up = rows["blocks.0.up"]
    assert up.why == "by --bits 4.6"
    assert up.format in up.effect
    assert {"cluster:3", "nf4", "int8"} <= up.effect.keys()
    assert up.effect["cluster:3"] > up.effect["int8"] > 0
    assert rows["blocks.0.up"].weight_error > 0


def test_the_plan_of_the_manifest_makes_the_same_artifact_again(
    mixed: stages.Outcome, tmp_path: Path
) -> None:
    stored = optimize.read_plan(mixed.path / "manifest.json", {"source": DIGITS.source})
    again = stages.optimize(stored, tmp_path / "again.infer")
    assert again.manifest.files[WEIGHTS] == mixed.manifest.files[WEIGHTS]
    assert again.manifest.plan == mixed.manifest.plan
    assert not any(f.what == "sensitivity" for f in again.manifest.findings), "nothing was left to decide"
    assert "--plan mixed" not in again.report.command
    assert "--plan again.infer/manifest.json" in again.report.command


def test_the_report_shows_the_layers_in_terminal_page_and_json(
    mixed: stages.Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(mixed.path)]) == 0
    said = capsys.readouterr().out
    assert "\nLayers\n" in said
    assert "blocks.0.up" in said
    page = html.render_html(mixed.report).replace("<wbr>", "")
    assert all(f">{row.name}<" in page for row in mixed.manifest.layers)
    stored = json.loads((mixed.path / "report.json").read_bytes())
    assert [row["name"] for row in stored["layers"]] == [row.name for row in mixed.manifest.layers]


def test_calibration_rows_are_recorded_and_not_used_for_fidelity(mixed: stages.Outcome) -> None:
    (rows,) = (f for f in mixed.manifest.findings if f.what == "calibration rows")
    assert rows.value == 256
    assert "calibration_inputs; sha256 " in rows.why
    assert "none of them is among the 64 that judge" in rows.why


def test_calibration_reports_layers_reached_and_values_clipped(tmp_path: Path) -> None:
    reporter = Reporter()
    loaded, run = stages.load(stages.resolve(DIGITS.with_(quant="int8:static")))
    stages.compress_model(run.plan, stages.capture_original(run.plan, loaded, reporter), reporter=reporter)
    found = {f.what: f for f in reporter.findings if f.stage == "calibrate"}
    assert found["rows"].value == 256
    assert found["layers reached"].value == 17
    assert found["layers reached"].why == "of 17"
    assert 0 <= found["saturation"].value <= found["worst saturation"].value < 0.2


def test_pinned_layers_are_not_raised_and_the_gate_refuses(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="not faithful enough: .*; every layer is pinned, or float already"):
        stages.optimize(
            DIGITS.with_(quant="cluster:2", layers={"*": "cluster:2"}, max_error=0.01), tmp_path / "d.infer"
        )
    assert list(tmp_path.iterdir()) == []


def error_of(plan: Plan) -> float:
    """Relative error of the logits on the rows that judge."""
    loaded, run = stages.load(stages.resolve(plan))
    original = stages.capture_original(run.plan, loaded, Reporter())
    small = stages.compress_model(run.plan, original).graph
    with torch.no_grad():
        want, got = (g.run(loaded.samples)["logits"] for g in (original.graph, small))
    return float((got - want).norm() / want.norm())


def test_sensitive_layers_are_raised_instead_of_a_refusal(tmp_path: Path) -> None:
    plan = DIGITS.with_(quant="cluster:2")
    plan = plan.with_(max_error=0.85 * error_of(plan))
    made = stages.optimize(plan, tmp_path / "d.infer")
    rose = [f for f in made.manifest.findings if f.what.startswith("rises ")]
    assert rose
    rows = {row.name: row for row in made.manifest.layers}
    for finding in rose:
        assert rows[finding.what.removeprefix("rises ")].why.startswith("rose ")
    assert "cluster:2" in {row.format for row in rows.values()}
    assert (
        sum(
            f.what == "digits.relative_error" or f.what == "logits.relative_error"
            for f in made.manifest.findings
        )
        == 1
    )


def test_budgets_and_pins_are_parsed() -> None:
    assert values.parse_share("0.5%") == pytest.approx(0.005)
    assert values.parse_share("0.02") == 0.02
    pins = values.parse_layers(("a=nf4", "b*=float", "a=cluster:3"))
    assert list(pins.items()) == [("b*", "float"), ("a", "cluster:3")]
    for text in ("5", "-1%", "much", "0"):
        with pytest.raises(UsageError, match="expected a share like 0.5% or 0.005"):
            values.parse_share(text)
    with pytest.raises(UsageError, match="expected NAME=FORMAT, got 'head'.*lm_head=int8"):
        values.parse_layers(("head",))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"bits": 4.5, "max_drop": 0.1}, "two budgets for one decision"),
        ({"layers": {"a": "nf4"}}, "Give --quant as well"),
        ({"quant": "nf4", "layers": {"a": "nf5"}}, "no quantizer named 'nf5'"),
        ({"quant": "nf4", "layers": {"a": "cluster:9"}}, "cluster"),
    ],
)
def test_contradictions_fail_before_anything_is_loaded(tmp_path: Path, asked: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        stages.optimize(Plan(source=str(tmp_path / "absent.pt"), **asked), tmp_path / "d.infer")


def test_fidelity_limits_follow_the_budget() -> None:
    assert precision(Plan(source="x", quant="cluster:3", bits=8.0)) == "int8"
    assert precision(Plan(source="x", quant="cluster:3", bits=4.5)) == "4bit"
    assert precision(Plan(source="x", quant="cluster:2", bits=3.5)) == "3bit"
    plan = Plan(source="x", quant="cluster:3", max_drop=0.01)
    assert limits(plan, "text-generation").perplexity == 0.01
    assert limits(plan, "classification").top1 == 0.99
    assert limits(plan, "embedding").relative_error == 0.01


def test_a_terminal_shows_the_layers_that_cost_most_in_their_order() -> None:
    rows = tuple(LayerChoice(f"l{i}", "nf4", 4.2, 0.1, {"nf4": float(i % 4)}) for i in range(48))
    shown = sections.most_costly(SimpleNamespace(layers=rows, plan=Plan(source="x", quant="nf4")))  # type: ignore[arg-type]
    assert [row.name for row in shown] == [row.name for row in rows if row.effect["nf4"] == 3.0]
    assert sections.layer_counts(rows) == "48 nf4"
    assert sections.layer_cells(rows[3])[:5] == ("l3", "nf4", "4.20", "0.1000", "3")


def test_reports_of_before_there_were_layers_can_still_be_read(mixed: stages.Outcome) -> None:
    old = msgspec.to_builtins(mixed.report)
    del old["layers"]
    assert msgspec.convert(old, document.Report).layers == ()
    assert Finding("layers", "x", 1.0) == msgspec.convert(
        {"stage": "layers", "what": "x", "value": 1.0}, Finding
    )
