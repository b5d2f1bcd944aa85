"""The report in terminals of every width, through a pipe and as a page: no line too wide, no short word cut."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from infer.report import document, sections
from infer.report.rendering import terminal
from infer.report.rendering.html import render_html
from infer.report.rendering.text_layout import Column, Table, command_lines, table_lines, wrap
from infer.spec import Choice, Finding, LayerChoice
from tests.report.test_report import sample
from tests.report.test_search_report import report_of
from tests.support import chromium

DATA = next(folder for folder in Path(__file__).resolve().parents if folder.name == "tests") / "data"
SHORT = "/home/someone/models/pydoc_lm/samples.txt"
LONG = "/home/someone/" + "of/a/very-long.path_here/" * 7 + "model.pt"
SOLID = "x" * 200
WIDE = "模型" * 60


def language_model() -> document.Report:
    return document.decode((DATA / "report.json").read_bytes())


def with_text(text: str, of: Callable[[], document.Report]) -> document.Report:
    """Put the text everywhere where a name or a path of a user can stand."""
    report = of()
    layers = tuple(
        LayerChoice(
            f"{text}.{i}", "int8", 8.0, 0.01 * i, {"int8": 0.1 * i, "nf4": 0.2}, why=text, by="budget"
        )
        for i in range(30)
    )
    findings = (
        *report.findings,
        Finding("load", "inputs from", text),
        Finding("load", "data", 91, "rows", why=f"{text}; sha256 {'8' * 64}"),
        Finding("compress", f"kept: {text}", 3, "weights", why="vectors are applied in float"),
    )
    return msgspec.structs.replace(
        report,
        name=text[:60],
        failure=f"{text} is above 0.02",
        layers=layers,
        findings=findings,
        baseline=text[:40],
        choices=(*report.choices, Choice("data", text, text, text)),
        versions={**report.versions, text: "1"},
        inputs=tuple(msgspec.structs.replace(spec, name=text) for spec in report.inputs),
        command=shlex.join(["infer", "optimize", text, "--output", f"{text} it's"]),
    )


KINDS = {"tensors": sample, "search": report_of, "language model": language_model}
TEXTS = {"short": "m.pt", "forty": SHORT, "long": LONG, "solid": SOLID, "wide": WIDE}
HARD = [(kind, text) for kind in KINDS for text in TEXTS]


def printed(report: document.Report, width: int | None) -> list[str]:
    out = io.StringIO()
    terminal.render_terminal(report, Console(file=out, width=width, force_terminal=width is not None))
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


def words(report: document.Report) -> set[str]:
    """Short words of all cells but those of columns that may be left out."""
    tables = [table for section in sections.sections(report, brief=True) for table in section.tables]
    cells = [
        cell
        for t in tables
        for row in t.rows
        for column, cell in zip(t.columns, row, strict=True)
        if not column.drop
    ]
    return {word for cell in cells for word in cell.split() if word.isalpha() and len(word) <= 10}


@pytest.mark.parametrize("width", [40, 80, 100, 120, 160])
@pytest.mark.parametrize(("kind", "text"), HARD)
def test_no_line_is_wider_than_the_terminal_and_no_column_is_squeezed(
    kind: str, text: str, width: int
) -> None:
    lines = printed(with_text(TEXTS[text], KINDS[kind]), width)
    assert max(map(cell_len, lines)) <= width
    tables = [line for line in lines if line]
    squeezed = [line for line in tables if len(line.strip()) < 4]
    assert len(squeezed) <= len(tables) / 20, squeezed


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize(("kind", "text"), HARD)
def test_short_words_stay_whole_beside_texts_of_any_length(kind: str, text: str, width: int) -> None:
    report = with_text(TEXTS[text], KINDS[kind])
    assert words(report) - set(re.findall(r"\w+", " ".join(printed(report, width)))) == set()


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("80", 80), ("132", 132), ("not a number", 100)])
def test_a_pipe_gets_100_columns_or_those_of_the_environment(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    widest = max(map(cell_len, printed(with_text(LONG, sample), None)))
    assert width - 8 < widest <= width


def test_the_report_is_as_wide_as_a_real_terminal() -> None:
    script = (
        "import sys, pathlib; from infer.cli import output; from infer.report import document\n"
        "report = document.decode(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "output.print_report(report, as_json=False, path=pathlib.Path('/folder' * 30))"
    )
    shell = f"stty cols 77; exec {shlex.join([sys.executable, '-c', script, str(DATA / 'report.json')])}"
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        ["sh", "-c", shell],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**environment, "TERM": "xterm"},
    )
    os.close(follower)
    said = b""
    while process.poll() is None or not said.endswith(b"\n"):
        try:
            said += os.read(leader, 65536)
        except OSError:  # the other end was closed
            break
    os.close(leader)
    assert process.wait() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).splitlines()
    assert 70 < max(map(cell_len, lines)) <= 77
    assert "Found on the way" in lines


@pytest.mark.parametrize("width", [1, 5, 17, 80])
@pytest.mark.parametrize(
    "text", [SHORT, LONG, SOLID, "a b  c", "", "/" * 50, "model.layers.0.self_attn.q_proj"]
)
def test_a_wrapped_text_loses_nothing(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(map(cell_len, lines)) <= width


def test_a_path_breaks_behind_its_separators() -> None:
    assert wrap("from /home/someone/models/pydoc_lm", 18) == ["from /home/", "someone/models/", "pydoc_lm"]


@pytest.mark.parametrize("width", [30, 80, 100])
@pytest.mark.parametrize("text", [SHORT, LONG, SOLID, "it's a 'name'", "'" * 90, "a" * 29 + " b", WIDE])
def test_a_command_of_several_lines_runs_as_it_is_copied(text: str, width: int) -> None:
    given = ["echo", text, "--output", text, "-q"]
    lines = command_lines(shlex.join(given), width)
    assert max(map(cell_len, lines)) <= width
    ran = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == given


def test_columns_that_can_be_spared_go_before_rows_become_lists() -> None:
    columns = Column("name"), Column("median", right=True), Column("spread", right=True, drop=1)
    table = Table(columns, [("first", "6.13 ms", "[5.90, 6.20]")])
    assert table_lines(table, 40) == (["name    median        spread"], ["first  6.13 ms  [5.90, 6.20]"])
    assert table_lines(table, 20) == (["name    median"], ["first  6.13 ms"])
    assert table_lines(table, 12)[1] == ["name  first", "medi  6.13", "an    ms"]


def test_figures_keep_their_units_and_break_before_brackets() -> None:
    table = Table((Column("batch", right=True), Column("ratio", right=True)), [("1", "0.881 [0.639, 0.957]")])
    assert table_lines(table, 21) == (
        ["batch           ratio"],
        ["    1           0.881", "       [0.639, 0.957]"],
    )


def test_heads_of_figures_wrap_so_that_a_wide_table_stays_a_table() -> None:
    names = "batch", "first token ms", "prefill tok/s", "decode tok/s"
    table = Table([Column(name, right=True) for name in names], [("1", "99.9", "641", "53.8")])
    heads, rows = table_lines(table, 31)
    assert len(heads) > 1
    assert [row.split() for row in rows] == [["1", "99.9", "641", "53.8"]]
    assert max(map(len, [*heads, *rows])) <= 31


def test_terminal_and_page_have_the_same_sections() -> None:
    report = with_text(SHORT, report_of)
    titles = [section.title for section in sections.sections(report)]
    assert re.findall(r"<h2>(.*?)</h2>", render_html(report)) == titles
    assert [line for line in printed(report, 100) if line in titles] == titles


CUT = r"""
[...function* () {
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    if (walk.currentNode.parentElement.closest("pre, svg, style, details, fieldset")) continue;
    for (const word of walk.currentNode.data.matchAll(/[^\s\/-]+/g)) {
      const range = document.createRange();
      range.setStart(walk.currentNode, word.index);
      range.setEnd(walk.currentNode, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(box => Math.round(box.top / 4)));
      if (word[0].length <= 12 && tops.size > 1) yield word[0];
    }
  }
}()]
"""


@pytest.mark.skipif(chromium.found() is None, reason="no browser")
def test_the_page_cuts_no_word_and_fits_windows_of_every_width(tmp_path: Path) -> None:
    with chromium.browser() as tab:
        for kind, text in HARD:
            (tmp_path / "report.html").write_text(render_html(with_text(TEXTS[text], KINDS[kind])))
            for width in (400, 800, 1400):
                tab.show(width)
                tab.go(f"file://{tmp_path}/report.html")
                assert tab.run("document.documentElement.scrollWidth") <= width, (kind, text, width)
                assert tab.run(CUT) == [], (kind, text, width)
        assert tab.errors == []


def at_sizes() -> document.Report:
    """Return a report of an output and of all outputs at nine sizes, of which batch 3 is the worst."""
    sizes = [*(f"batch {n}" for n in (1, 2, 3, 64)), *(f"seq {n}" for n in (1, 7, 64, 128, 512))]
    rows = []
    for size in sizes:
        value = 0.09 if size == "batch 3" else 0.01
        for subject, metric in ((f"embedding at {size}", "worst_slice_error"), (size, "relative_error")):
            label, why = f"{subject}.{metric}", f"said at {size}"
            used = value / 0.1
            rows.append(
                document.FidelityRow(label, value, "", why, subject, metric, 0.1, used=used, ok=value < 0.1)
            )
    return msgspec.structs.replace(sample(), fidelity=(*sample().fidelity, *rows))


def test_of_many_sizes_the_report_shows_the_worst_and_json_all() -> None:
    report = at_sizes()
    (section,) = (part for part in sections.sections(report) if part.title == "Fidelity")
    rows = {row[0]: row[-1] for row in section.tables[0].rows if "size" in row[0]}
    said = "worst of 9 sizes: batch 3; said at batch 3"
    assert rows == {"sizes: embedding.worst_slice_error": said, "sizes: relative_error": said}
    assert "embedding at seq 512.worst_slice_error" in document.encode(report).decode()
    page = render_html(report)
    assert "seq 512" not in page
    assert page.count("worst of 9 sizes") == 2


def test_a_cell_without_a_figure_is_empty_so_that_narrow_pages_hide_it() -> None:
    row = document.FidelityRow("y.rows", 100, "", "rows compared", "y", "rows")
    page = render_html(msgspec.structs.replace(sample(), fidelity=(row,)))
    assert '<td class="num" data-head="limit"></td>' in page
