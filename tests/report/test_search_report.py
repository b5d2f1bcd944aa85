"""The search in the report: front, trials, commands, and a plot that needs no script."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from infer.budget_search.progress import State
from infer.budgets import Budgets
from infer.cli.search_display import view
from infer.report import document, search_page, search_tables
from infer.report.rendering import terminal
from infer.report.rendering.html import render_html
from infer.report.rendering.optimize_summary import HEIGHT, WIDTH, screen
from infer.report.search_record import SearchRecord
from tests.support import chromium
from tests.support.search_records import BUDGETS, record

DATA = next(folder for folder in Path(__file__).resolve().parents if folder.name == "tests") / "data"


def report_of(found: SearchRecord | None = None) -> document.Report:
    old = document.decode((DATA / "report.json").read_bytes())
    return msgspec.structs.replace(old, search=found or record())


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.dots: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if (dict(attrs).get("class") or "").startswith("dot"):
            self.dots.append(dict(attrs))


def test_a_report_with_a_search_survives_json() -> None:
    report = report_of()
    assert document.decode(document.encode(report)) == report


def test_the_page_needs_no_script_and_every_dot_can_be_reached_by_keyboard() -> None:
    page = Page()
    page.feed(render_html(report_of()))
    assert "script" not in page.tags
    assert len(page.dots) == 9
    assert all(dot["tabindex"] == "0" and dot["role"] == "img" and dot["aria-label"] for dot in page.dots)
    labels = " ".join(str(dot["aria-label"]) for dot in page.dots)
    assert "inductor int8, chosen: 2.80 ms, 571/s, memory 400 MB, 24.0 MB, relative error 1.2 %" in labels


def test_names_and_reasons_are_escaped_on_the_page() -> None:
    text = render_html(report_of())
    assert "&lt;lower&gt; &amp; co" in text
    assert "<lower>" not in text


def test_the_table_has_the_chosen_trial_first_and_skipped_ones_last() -> None:
    rows = search_tables.rows(record())
    assert rows[0][:2] == ("chosen", "inductor int8")
    assert [row[1] for row in rows[-2:]] == ["openvino int8", "ort cluster:2"]
    assert rows[-1][-1].startswith("skipped: eager cluster:2: not faithful enough")
    assert all(len(row) == len(search_tables.COLUMNS) for row in rows)


def test_a_trial_outside_the_budgets_names_the_needed_budgets() -> None:
    by_name = {row[1]: row[-1] for row in search_tables.rows(record())}
    assert by_name["inductor int8"] == "within the budgets"
    assert by_name["inductor float"] == "would need --max-latency 6ms and --max-memory 500MB"


def test_the_terminal_report_lists_front_and_commands() -> None:
    plain = Console(file=io.StringIO(), width=100)
    terminal.render_terminal(report_of(), plain)
    said = plain.file.getvalue()  # type: ignore[attr-defined]
    assert "11 trials in 95.0 s: 9 measured" in said
    assert "infer optimize model.pt --backend ort --quant int8" in said


def test_the_last_screen_of_a_search_fits_one_screen() -> None:
    lines = screen(report_of(), Path("model.infer"))
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("search    11 trials in 95.0 s: 9 measured") for line in lines)
    assert any(line.startswith("front     ") for line in lines)


def test_a_search_of_one_point_has_no_plot() -> None:
    found = record()
    assert search_page.plot(msgspec.structs.replace(found, trials=found.trials[:1])) == ""
    assert search_page.plot(msgspec.structs.replace(found, trials=())) == ""


def test_a_score_of_the_user_is_plotted_in_place_of_the_error() -> None:
    found = record(Budgets(metric="file.py:score", min_score=0.5), max_error=None)
    trials = tuple(
        msgspec.structs.replace(t, measured=msgspec.structs.replace(t.measured, score=0.9 - 0.01 * i))
        for i, t in enumerate(found.trials)
        if t.measured is not None
    )
    drawn = search_page.plot(msgspec.structs.replace(found, trials=trials))
    assert "score (higher is better)" in drawn
    assert "least score 0.5" in drawn


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [0.0, 5.0], [1e-9, 10.0], [3.0, 3.1], [-0.5, 0.5]])
def test_every_value_of_an_axis_has_its_place_between_the_ends(values: list[float]) -> None:
    axis = search_page.Axis.over(values, 10.0, 110.0)
    places = [axis.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(10 <= place <= 110 for place in places)
    assert 1 <= len(axis.ticks()) <= 40
    assert all(10 <= axis.place(tick) <= 110 for tick in axis.ticks())


def test_the_plotted_pareto_front_is_monotonic() -> None:
    drawn = search_page.plot(record())
    path = re.search(r'class="front" d="M([^"]+)"', drawn)
    assert path is not None
    points = [tuple(map(float, point.split())) for point in path[1].split("L")]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)  # down the page is less loss


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_display_keeps_its_figures_beside_a_long_name(width: int) -> None:
    trial = next(t for t in record().trials if t.on_front)
    long = msgspec.structs.replace(
        trial.candidate, options=("num_streams=4", "hint=latency"), kv_dtype="int8"
    )
    front = (msgspec.structs.replace(trial, candidate=long),)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(view(State(4, "ort int8", "lower ort", 12.0, 48.0, None, front, BUDGETS)))
    said = captured.get()
    assert search_tables.cells(front[0], record())[2] in said
    assert "hint latency" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= width


def test_the_live_display_shows_best_front_and_time_left() -> None:
    found = record()
    front = tuple(t for t in found.trials if t.on_front)
    now = State(4, "ort int8", "lower ort", 12.0, 48.0, found.trials[5], front, BUDGETS)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(view(now))
    said = captured.get()
    assert "trial 4: ort int8  lower ort  12 s, 48 s left" in said
    assert "best so far: inductor int8" in said
    assert "2.80 ms" in said


@pytest.mark.skipif(chromium.found() is None, reason="no browser")
def test_hover_focus_and_filters_work_in_a_browser(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(render_html(report_of()))
    visible = "getComputedStyle(document.querySelectorAll('.dot .tip')[2]).visibility"
    shown = "[...document.querySelectorAll('.dot')].filter(d => getComputedStyle(d).display != 'none').length"
    with chromium.browser() as tab:
        tab.show(1000)
        tab.go(f"file://{tmp_path}/report.html")
        assert tab.run(visible) == "hidden"
        tab.run("document.querySelectorAll('.dot')[2].focus()")
        assert tab.run(visible) == "visible"
        assert tab.run(shown) == 9
        tab.run("document.querySelector('#show-0').click()")
        assert tab.run(shown) == 6
        hidden = (
            "[...document.querySelectorAll('.trials tr.backend-0')].map(r => getComputedStyle(r).display)"
        )
        assert set(tab.run(hidden)) == {"none"}
        tab.run("document.querySelector('#show-0').click()")
        assert tab.errors == []
        assert len(tab.asked) == 1


@pytest.mark.skipif(chromium.found() is None, reason="no browser")
@pytest.mark.parametrize("width", [1000, 420])
def test_trials_are_sorted_by_the_figure_that_is_asked_for(tmp_path: Path, width: int) -> None:
    (tmp_path / "report.html").write_text(render_html(report_of()))
    seen = (
        "[...document.querySelectorAll('.trials tbody tr')]"
        ".sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)"
        ".map(r => r.querySelector('[data-head=trial]').textContent)"
    )
    head = "document.querySelector('.trials thead').getBoundingClientRect().top"
    first = "document.querySelector('.trials tbody tr').getBoundingClientRect().top"
    found = record()
    sizes = {t.candidate.label: t.measured.size for t in found.trials if t.measured is not None}
    with chromium.browser() as tab:
        tab.show(width)
        tab.go(f"file://{tmp_path}/report.html")
        assert tab.run(seen) == [row[1] for row in search_tables.rows(found)]
        assert width < 700 or tab.run(head) <= tab.run(first)
        tab.run("document.querySelector('#sort-4').click()")
        shown = tab.run(seen)
        assert [sizes[label] for label in shown if label in sizes] == sorted(sizes.values())
        assert shown[-2:] == ["openvino int8", "ort cluster:2"], "what was not measured stands last"
        assert tab.errors == []


def test_every_form_of_the_report_says_why_this_trial() -> None:
    plain = Console(file=io.StringIO(), width=100)
    terminal.render_terminal(report_of(), plain)
    said = " ".join(plain.file.getvalue().split())  # type: ignore[attr-defined]
    assert (
        "Chosen: inductor int8: 2,857 per second, best of the trials within budgets; ort int8 within" in said
    )
    assert "Chosen: inductor int8: 2,857 per second" in render_html(report_of())
    assert "ort int8 within noise of it &amp; co." in render_html(report_of())
    lines = screen(report_of(), Path("m.infer"))
    assert any(line.startswith("chosen    inductor int8: 2,857 per second") for line in lines)
