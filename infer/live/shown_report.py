"""Report of a compiled module for people: the screen of `infer optimize`, as text and in a notebook."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..report.document import Report
from ..report.rendering.optimize_summary import render_screen

WIDTH = 100  # columns
HTML = "<pre style='line-height: 1.2'>{code}</pre>"


@dataclass(frozen=True, repr=False)
class ShownReport:
    """Reports of the variants of a compiled module, with the artifact of each; the first variant had the most calls."""

    reports: tuple[tuple[Path, Report], ...]

    def __str__(self) -> str:
        text = io.StringIO()
        self._print(Console(file=text, width=WIDTH))
        return text.getvalue()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True)
        self._print(console)
        return console.export_html(inline_styles=True, code_format=HTML)

    def _print(self, console: Console) -> None:
        for path, report in self.reports:
            render_screen(report, console, path)
