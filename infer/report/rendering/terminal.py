"""The report on a terminal: verdict, card and tables, as wide as it; elsewhere 100 columns, or COLUMNS."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from ..document import Report
from ..sections import Section, sections
from .text_layout import WIDTH, Column, Table, command_lines, show_lines, table_lines, width_of, wrap


def render_terminal(report: Report, console: Console) -> None:
    """Print the report; texts are not interpreted as markup."""
    width = width_of(console, elsewhere=WIDTH)
    title = f"{report.name}: {report.backend} {report.precision}, {report.device}"
    show_lines(console, wrap(title, width), style="bold")
    show_lines(console, wrap(report.headline, width), style="bold green" if report.passed else "bold red")
    for line in (*report.verdict, *([report.failure] if report.failure else [])):
        show_lines(console, wrap(line, width))
    for section in sections(report, brief=True):
        show_lines(console, ["", *wrap(section.title, width)], style="bold")
        for line, style in _section(section, width):
            show_lines(console, [line], style=style)


def _section(section: Section, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a section, each with its style."""
    for text in section.lines:
        yield from ((line, "") for line in wrap(text, width))
    if section.pairs:
        pairs = Table((Column(""), Column("")), section.pairs)
        yield from ((line, "") for line in table_lines(pairs, width)[1])
    for number, table in enumerate(section.tables):
        heads, body = table_lines(table, width)
        yield from (
            (line, "dim") for line in [*([""] if number else []), *wrap(table.caption, width), *heads]
        )
        yield from ((line, "") for line in body)
    for label, command in section.commands:
        yield from ((line, "dim") for line in ["", *(wrap(f"{label}:", width) if label else [])])
        yield from ((line, "") for line in command_lines(command, width))
