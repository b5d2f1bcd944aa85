"""The models table: cells say what happened, the page is made of the result file, rows are found by pattern."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.models import checks, gguf_speed, table
from bench.models.checks import BROKEN, NONE, REFUSED, WORKS, Cell
from bench.models.decoders import ENTRIES
from infer.errors import NotUsableError


def refuses() -> None:
    raise NotUsableError("layer x (Y) mixes tokens. Use another", hint="Use --task score")


def differs() -> None:
    raise AssertionError("token 3 differs")


def fails() -> None:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("check", "outcome", "why"),
    [
        (lambda: None, WORKS, ""),
        (lambda: "remark", WORKS, "remark"),
        (refuses, REFUSED, "layer x (Y) mixes tokens"),
        (differs, BROKEN, "wrong: token 3 differs"),
        (fails, BROKEN, "KeyError at test_models_table.py:"),
    ],
)
def test_a_table_cell_states_its_outcome(check: object, outcome: str, why: str) -> None:
    cell = checks.attempt(check)  # type: ignore[arg-type]
    assert cell.outcome == outcome
    assert cell.why.startswith(why)


def test_name_patterns_select_table_rows() -> None:
    assert table.matches("decoders", "llama (yarn rope)", "decoders,llama*")
    assert table.matches("decoders", "llama (yarn rope)", "heads,x;decoders,llama (yarn rope)")
    assert not table.matches("heads", "llama", "decoders,*")
    assert table.matches("heads", "llama", "heads")


def test_a_section_counts_rows_that_work_in_every_column() -> None:
    columns = table.kind_of("decoders").COLUMNS
    good = {column: Cell(WORKS) for column in columns}
    rows = {"a": good, "b": {**good, columns[1]: Cell(REFUSED, "a | b")}, "c": {columns[0]: Cell(WORKS)}}
    text = table.section("decoders", rows)
    assert "1 of 3 work in every column." in text
    assert "refused: a \\| b" in text
    assert NONE in text.splitlines()[-1]


def test_the_page_is_made_of_the_result_file() -> None:
    rows = table.read()
    shown = [
        line.split(" | ")[0].removeprefix("| ")
        for line in table.PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert [name for name in shown if name != "|"] == [row for kind in table.KINDS for row in rows[kind]]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = (
            nn.Embedding(64, 16),
            nn.Linear(16, 64, bias=False),
            nn.LayerNorm(16),
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_random_weights_give_a_clear_best_token() -> None:
    model = _Tied()
    checks.randomize(model, trained=True)
    logits = model.head(nn.functional.layer_norm(model.embed.weight, (16,)))
    first, second = logits.topk(2).values.unbind(-1)
    assert bool((first > second).all())
    assert len(set(logits.argmax(-1).tolist())) > 48
    before = model.embed.weight.clone()
    checks.randomize(model, trained=True)
    assert torch.equal(model.embed.weight, before)


def test_random_weights_add_little_behind_norms() -> None:
    """OLMo 2 has its norms behind the layers: random ones added several times the embedding."""
    model = ENTRIES["olmo2"].build()
    checks.randomize(model, trained=True)
    ids = torch.randint(3, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = model(ids, output_hidden_states=True).hidden_states[:2]
    assert float((after - before).norm() / before.norm()) < 0.4


def test_block_types_have_the_newest_factor_of_each_work_beside_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, date: str, *bars: tuple[str, str, float | None]) -> None:
        rows = [{"work": work, "rival": rival, "need": 1.2, "got": got} for work, rival, got in bars]
        text = json.dumps({"date": date, "machine": {"cpu": "CPU"}, "versions": {}, "bars": rows})
        (tmp_path / f"{name}-{date}-cpu.json").write_text(text)

    decode, prefill = "same q4_K_M file, decode 1B 128", "same q4_K_M file, prefill 1B 512"
    write("lm", "2026-01-02", (decode, "llama.cpp q4_K_M", 1.5), (decode, "reading memory", 0.9))
    write("lm", "2026-01-01", (decode, "llama.cpp q4_K_M", 9.0), (prefill, "llama.cpp q4_K_M", 2.0))
    write("lm", "2026-01-03", (decode, "llama.cpp q4_K_M", None), ("decode 1B 128", "llama.cpp, best", 1.1))
    monkeypatch.setattr(gguf_speed, "RESULTS", tmp_path)
    assert gguf_speed.speeds() == {
        "Q4_K": "1B: decode 1.50 ×, prefill 2.00 × (2026-01-01, CPU; 2026-01-02, CPU)"
    }
