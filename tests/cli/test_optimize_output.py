"""Output of `infer optimize`: the verdict on one screen, a line of progress for each stage, all of it on request."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.progress import Progress

from infer.cli import main
from infer.report import document
from infer.report.rendering import optimize_summary, progress
from infer.spec import Finding, LayerChoice
from tests.report.test_report import FINDINGS, sample

ROOT = Path(__file__).resolve().parents[2]
DIGITS = [str(ROOT / "models/digits.pt"), "--model", f"{ROOT / 'models/digits.py'}:build"]


def fits(lines: list[str], width: int = optimize_summary.WIDTH) -> bool:
    return len(lines) <= optimize_summary.HEIGHT and max(map(len, lines)) <= width


def test_the_verdict_fits_a_screen_and_a_pipe_gets_a_line_per_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["optimize", *DIGITS, "--backend", "eager", "--quant", "int8", "--allow-slower"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert fits(lines)
    assert lines[0].startswith("digits: passed. eager int8")
    assert "infer report digits.infer" in printed.out
    assert "top-1 agreement" in printed.out
    stages = [line.split()[2] for line in printed.err.splitlines()]
    assert stages == list(dict.fromkeys(stages))
    assert main(["report", "digits.infer"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > optimize_summary.HEIGHT, "the report has the rest"


@pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
def test_the_verdict_of_a_language_model_fits_a_screen(pydoc_artifact: Path) -> None:
    report = document.decode((pydoc_artifact / "report.json").read_bytes())
    lines = optimize_summary.screen(report, pydoc_artifact)
    assert fits(lines)
    assert any("perplexity change" in line for line in lines)


def test_the_verdict_of_an_encoder_fits_a_screen() -> None:
    lines = optimize_summary.screen(sample(), Path("minilm.infer"))
    assert fits(lines)
    assert lines[1].strip().startswith("2.10x faster at batch 1")
    figures = lines[lines.index("") + 1 :][:6]
    assert [line.split()[0] if line else "" for line in figures] == [
        "size",
        "speed",
        "fidelity",
        "memory",
        "",
        "report",
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_longest_verdict_still_fits_and_ends_with_where_the_report_is(width: int) -> None:
    long = "a sentence that goes on and on and says what nobody needed to hear " * 8
    layers = tuple(LayerChoice(f"blocks.{i}.mlp", "float", 32.0, why=long) for i in range(300))
    report = msgspec.structs.replace(
        sample(), verdict=tuple(f"{i} {long}" for i in range(12)), layers=layers, failure=long
    )
    report = msgspec.structs.replace(
        report, tried=tuple(msgspec.structs.replace(t, why=long) for t in report.tried)
    )
    lines = optimize_summary.screen(report, Path("/a/folder" * 12) / "name.infer", width=width)
    assert fits(lines, width)
    assert any(line.startswith("size") for line in lines)
    assert any(line.startswith("report") for line in lines)
    assert any(line.startswith("serve") for line in lines)


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_next_commands_are_whole_and_can_be_copied_whatever_the_path(width: int) -> None:
    path = Path("/home/some one/" + "very-long.name/" * 14 + "x.infer")
    lines = optimize_summary.screen(sample(), path, width=width)
    assert max(map(len, lines)) <= width
    start = lines.index("serve") + 1
    assert shlex.split("\n".join(lines[start:]).replace("\\\n", "")) == ["infer", "serve", str(path)]


def test_a_step_with_a_long_path_leaves_room_for_its_bar_and_time() -> None:
    with Progress(console=Console(file=io.StringIO(), width=80, force_terminal=True)) as bars:
        progress.BarReporter(bars).step("load", "/home/someone/" + "very-long.name/" * 14 + "model.pt")
        said = bars.tasks[-1].description
    assert said.startswith("load     [dim]/home/someone/")
    assert said.endswith("name/model.pt")
    assert len(said.replace("[dim]", "")) + progress.BESIDE <= 80


def test_the_figures_are_five_lines_and_the_next_commands_follow() -> None:
    layers = tuple(LayerChoice(f"blocks.{i}.mlp", "int8", 8.0) for i in range(3))
    report = msgspec.structs.replace(sample(), layers=layers)
    lines = optimize_summary.screen(report, Path("my model.infer"))
    start = lines.index("")
    assert [line.split()[0] for line in lines[start + 1 : start + 6]] == [
        "size", "speed", "fidelity", "layers", "memory",
    ]  # fmt: skip
    assert lines[start + 6] == ""
    assert lines[-1] == "serve     infer serve 'my model.infer'"
    text = msgspec.structs.replace(report, decodes=True)
    assert any(
        "infer generate 'my model.infer'" in line
        for line in optimize_summary.screen(text, Path("my model.infer"))
    )


@pytest.mark.parametrize("backend", ["ort", "openvino"])
def test_layers_that_compute_in_float_are_said_to(backend: str) -> None:
    layers = tuple(LayerChoice(f"blocks.{i}.mlp", "int8", 8.0) for i in range(3))
    findings = (Finding("lower", "ort layers in float", 2),)
    report = msgspec.structs.replace(sample(), layers=layers, findings=findings, backend=backend)
    line = next(row for row in optimize_summary.screen(report, Path("m.infer")) if row.startswith("layers"))
    assert line.startswith("layers    3 int8")
    assert ("; 2 compute in float, decoded when it opens" in line) is (backend == "ort")


def test_a_limit_of_the_artifact_is_read_before_its_speed() -> None:
    limit = "scores text only: no KV cache"
    report = msgspec.structs.replace(sample(), verdict=("2.1x faster", limit), limitations=(limit,))
    assert optimize_summary.screen(report, Path("m.infer"))[1].strip() == limit


def test_a_pipe_gets_each_stage_once_and_findings_only_when_verbose() -> None:
    said = {}
    for verbose in (False, True):
        out = io.StringIO()
        watch = progress.LineReporter(Console(file=out, width=300), verbose=verbose)
        for backend in ("ort", "inductor"):
            watch.step("lower", backend)
            watch.found([FINDINGS[0]])
        said[verbose] = out.getvalue().splitlines()
    assert [line.split()[2:] for line in said[False]] == [["lower", "ort"]]
    assert len(said[True]) == 4
    assert "load: kind huggingface (config.json names BertModel)" in said[True][1]
    assert progress.sentence(Finding("load", "weights", 90.9, "MB")) == "load: weights 90.9 MB"


def test_a_pipe_gets_later_steps_of_a_stage_where_the_last_line_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter((0.0, 1.0, 2.0, 13.0, 14.0))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    watch = progress.LineReporter(Console(file=out, width=300))
    for backend in ("ort", "openvino", "inductor", "eager"):
        watch.step("lower", backend)
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["ort", "inductor"]
