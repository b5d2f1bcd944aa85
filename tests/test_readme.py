"""README's examples run, its commands exist, its figures are those of the result files, its links lead to pages."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch import nn

import infer
from bench.shared import results_page
from infer import Plan, optimize
from infer.cli import application, main
from infer.live.compiled_model import CompiledModel
from tests.support.page_blocks import ROOT, blocks

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(ROOT / "README.md")
RESULTS = ROOT / "bench/results"
KERNELS, LM = (f"{name}-2026-11-22-amd-epyc.md" for name in ("kernels", "lm"))
PEERS = "serve-peers-2026-11-25-amd-epyc.md"
FIGURES = {  # (first words of README's row, rival) -> file, first cells of the row there, column of the ratio
    ("MiniLM int8, 8", "ONNX Runtime int8"): (KERNELS, "MiniLM 8×64 | ORT int8", 5),
    ("MiniLM int8, 8", "OpenVINO int8"): (KERNELS, "MiniLM 8×64 | OpenVINO int8", 5),
    ("MiniLM int8, 8", "torch float32"): (KERNELS, "MiniLM 8×64 | torch float32", 5),
    ("BERT-base", "ONNX Runtime int8"): (KERNELS, "BERT-base 1×128 | ORT int8", 5),
    ("BERT-base", "OpenVINO int8"): (KERNELS, "BERT-base 1×128 | OpenVINO int8", 5),
    ("BERT-base", "torch float32"): (KERNELS, "BERT-base 1×128 | torch float32", 5),
    ("ResNet-50", "ONNX Runtime int8"): (KERNELS, "ResNet-50 1×3×224×224 | ORT int8", 5),
    ("ResNet-50", "OpenVINO int8"): (KERNELS, "ResNet-50 1×3×224×224 | OpenVINO int8", 5),
    ("135M Llama", "llama.cpp"): (LM, "decode 135M 128 | llama.cpp", 5),
    ("135M Llama", "transformers eager"): (LM, "decode 135M, against transformers | transformers eager", 5),
    ("1B Llama, 4 bits, decode", "llama.cpp"): (LM, "decode 1B 128 | llama.cpp", 5),
    ("1B Llama, 4 bits, 8", "llama.cpp"): (LM, "decode 1B 8×128 | llama.cpp", 5),
    ("MiniLM int8 served, rivals with ONNX", "mosec"): (PEERS, "minilm, 32 | mosec-ort", 5),
    ("MiniLM int8 served, rivals with ONNX", "LitServe"): (PEERS, "minilm, 32 | litserve-ort", 5),
    ("MiniLM int8 served, rivals with ONNX", "BentoML"): (PEERS, "minilm, 32 | bentoml-ort", 5),
    ("MiniLM int8 served, rivals with infer", "mosec"): (PEERS, "minilm, 32 | mosec-same", 5),
    ("MiniLM int8 served, rivals with infer", "LitServe"): (PEERS, "minilm, 32 | litserve-same", 5),
    ("MiniLM int8 served, rivals with infer", "BentoML"): (PEERS, "minilm, 32 | bentoml-same", 5),
}


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 160


def test_the_first_block_shows_targets_of_the_makefile() -> None:
    assert BLOCKS[0].language == "console"
    commands = re.findall(r"^\$ make (\w+)", BLOCKS[0].text, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    named = [*commands, *re.findall(r"`make (\w+)`", README)]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_python_examples_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = ROOT / "models"
    plan = Plan(
        source=f"{models}/digits.pt",
        model=f"{models}/digits.py:build",
        backend="eager",
        batches=(1,),
        allow_slower=True,  # timings on a machine that has other work decide nothing
    )
    optimize(plan, Path("model.infer"))
    artifact, modules = [block.text for block in BLOCKS if block.language == "python"]
    names = {"array": np.zeros((1, 1, 8, 8), "float32")}
    exec(compile(artifact, "README.md", "exec"), names)  # noqa: S102
    assert names["answer"].shape == (1, 10)
    quick = partial(infer.compile, backend="eager", batches=(1,), allow_slower=True)
    monkeypatch.setattr(infer, "compile", quick)
    monkeypatch.setattr("infer.live.recording.compile_model", quick)
    torch.manual_seed(0)
    module, pipe = Masked().eval(), Pipe()
    x, mask = torch.randn(4, 64), torch.ones(4, 64)
    exec(compile(modules, "README.md", "exec"), {  # noqa: S102
        "infer": infer, "module": module, "loader": [(x, mask)], "x": x, "mask": mask, "pipe": pipe,
    })  # fmt: skip
    assert isinstance(pipe.unet, CompiledModel)
    assert isinstance(pipe.text_encoder, CompiledModel)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * mask


class Pipe:
    def __init__(self) -> None:
        self.text_encoder, self.unet = nn.Linear(8, 64).eval(), Masked().eval()

    @torch.no_grad()
    def __call__(self, prompt: str) -> torch.Tensor:
        condition = self.text_encoder(torch.full((1, 8), float(len(prompt))))
        return self.unet(torch.ones(1, 64), mask=condition)


def test_every_readme_command_parses() -> None:
    known = typer.main.get_command(application())
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    console = [block for page in pages for block in blocks(page) if block.language == "console"]
    shown = [command.words for block in console for command in block.commands()]
    shown = [words for words in shown if words[0] == "infer"]
    assert shown
    for _, name, *arguments in shown:
        known.commands[name].make_context(name, list(arguments))


def test_the_readme_lists_every_command() -> None:
    shown = re.findall(r"^\| `infer (\w+)", README, re.MULTILINE)
    assert shown == list(typer.main.get_command(application()).commands)


def test_the_error_shown_in_the_readme_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [c for block in BLOCKS for c in block.commands() if c.shows_error]
    assert main(list(command.words[1:])) == 2
    assert capsys.readouterr().err.strip() == command.output


@pytest.mark.parametrize(("row", "rival"), FIGURES, ids=lambda text: text.replace(" ", "-"))
def test_the_figures_are_those_of_the_result_files(row: str, rival: str) -> None:
    file, start, column = FIGURES[row, rival]
    (line,) = re.findall(rf"^\| {re.escape(row)}.*\|$", README, re.MULTILINE)
    shown = re.search(rf"\| {re.escape(rival)} ([\d.]+) ", line)
    assert shown is not None
    lines = (RESULTS / file).read_text().splitlines()
    # the first row of that name is the time, later ones are errors
    measured = next(text for text in lines if text.startswith(f"| {start}")).strip("| ").split("|")[column]
    if file == PEERS:
        measured = next(text for text in lines if text.startswith(f"| {start}")).split("|")[6]
    assert float(shown[1]) == pytest.approx(float(measured), rel=0.03, abs=0.05)


def test_every_figure_of_the_readme_is_checked() -> None:
    table = README.partition("| work |")[2].partition("\n\n")[0]
    cells = [cell.strip() for line in table.splitlines()[2:] for cell in line.strip("|").split("|")[1:]]
    assert len(list(filter(None, cells))) == len(FIGURES)


def test_the_results_page_is_that_of_the_result_files() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "python -m bench.shared.results_page"


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.name
)
def test_links_between_pages_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading and file.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in known, f"{page.name} links to {target}"
