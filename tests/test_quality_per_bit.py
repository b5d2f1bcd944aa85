"""Quality per bit: bars between contenders, the plot, and what the rivals' files are read as."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.quality import llama_cpp_quantization, peer_quantization, quality_per_bit_plot
from bench.quality.quality_per_bit_rows import QualityRow, bars, best, markdown
from bench.quality.reference_models import Decoder, ReferenceModel


def row(contender: str, name: str, bits: float | None, loss: float = 0.0, **more: str) -> QualityRow:
    figures = {} if bits is None else {"kl": loss}
    kept = {"model": "m", "scope": "all", "metric": "kl", **more}
    return QualityRow(contender=contender, name=name, bits=bits, num_bytes=1, figures=figures, **kept)


def test_a_rival_is_compared_with_the_best_of_ours_at_no_more_bits() -> None:
    rows = [
        row("infer", "small", 3.0, 0.4), row("infer", "fits", 4.0, 0.1), row("infer", "large", 4.1, 0.01),
        row("infer", "other scope", 3.9, 0.0, scope="blocks"), row("llama.cpp", "Q4", 4.05, 0.2),
    ]  # fmt: skip
    (bar,) = bars(rows)
    assert (bar.details["compared"], bar.ours, bar.theirs, bar.is_met) == ("fits", 0.1, 0.2, True)
    assert best(rows[:1], 2.9) is None


def test_a_rival_without_ours_at_so_few_bits_is_a_missed_bar() -> None:
    (bar,) = bars([row("infer", "a", 4.0, 0.1), row("llama.cpp", "Q2", 3.0, 0.2)])
    assert not bar.is_met
    assert "no result of infer" in bar.why


def test_rivals_outside_the_range_of_bits_are_no_bars() -> None:
    ours = row("infer", "a", 2.0, 0.1)
    assert bars([ours, row("llama.cpp", "low", 2.4, 0.2), row("llama.cpp", "high", 6.1, 0.2)]) == []


def test_a_rival_that_failed_is_a_row_with_its_reason() -> None:
    rows = [row("infer", "a", 4.0, 0.1), row("GPTQModel", "W4", None, why="crashed: signal 11")]
    assert bars(rows) == []
    assert "| GPTQModel | W4 | crashed: signal 11 |" in markdown(rows)


def test_the_plot_is_one_described_picture_of_what_was_measured() -> None:
    rows = [
        row("infer", "a", 3.0, 0.4), row("infer", "b", 4.0, 0.1), row("infer", "nf4", 4.2, 0.2, kind="uniform"),
        row("llama.cpp", "<Q4>", 4.5, 0.2), row("llama.cpp", "zero", 4.6, 0.0), row("GPTQModel", "W4", None),
    ]  # fmt: skip
    root = ET.fromstring(quality_per_bit_plot.plot(rows))
    names = {"svg": "http://www.w3.org/2000/svg"}
    titles = [one.text for one in root.findall(".//svg:title", names)]
    assert root.get("role") == "img"
    assert "m, all weights, about 4 bits: least loss 0.1" in (root.findtext("svg:desc", "", names))
    assert titles[1:] == [
        "infer a: 3.000 bits, KL, nats 0.4", "infer b: 4.000 bits, KL, nats 0.1",
        "infer nf4: 4.200 bits, KL, nats 0.2", "llama.cpp <Q4>: 4.500 bits, KL, nats 0.2",
    ]  # fmt: skip


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        logits = self.head(self.embed(input_ids))
        return type("Output", (), {"logits": logits})()


@pytest.fixture
def tiny() -> ReferenceModel:
    torch.manual_seed(0)
    rows = {"input_ids": torch.arange(8).reshape(2, 4)}
    return ReferenceModel(
        "tiny", Path(), Decoder(Tiny()), rows, rows, "text-generation", "logits", "kl", "embed"
    )


def test_float_weights_are_back_after_they_were_judged(tiny: ReferenceModel) -> None:
    before = tiny.parameters["embed.weight"].clone()
    assert list(tiny.parameters) == ["embed.weight"]
    assert tiny.judge({"embed.weight": before})["kl"] == 0
    figures = tiny.judge({"embed.weight": before + 1 + torch.arange(8)[:, None]})
    assert figures["kl"] > 0.1
    assert torch.equal(tiny.parameters["embed.weight"], before)


def test_weights_of_unknown_names_or_shapes_are_refused(tiny: ReferenceModel) -> None:
    with pytest.raises(ValueError, match=r"expected a parameter of tiny, got other \[2\]"):
        tiny.judge({"other": torch.zeros(2)})


def test_rows_of_queries_come_back_in_the_order_of_transformers(tiny: ReferenceModel, tmp_path: Path) -> None:
    tiny.folder = tmp_path
    (tmp_path / "config.json").write_text('{"head_dim": 4}')
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    stored = rows.reshape(2, 2, 2, 3).transpose(1, 2).reshape(8, 3)  # llama.cpp's converter
    assert torch.equal(llama_cpp_quantization._order(tiny, "layers.0.q_proj.weight", stored), rows)
    assert torch.equal(llama_cpp_quantization._order(tiny, "layers.0.v_proj.weight", stored), stored)


def test_a_peer_without_an_environment_says_so(tiny: ReferenceModel, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="names no Python"):
        peer_quantization.contender(tiny, peer_quantization.SETTINGS[0], "all", None, tmp_path)
