"""Texts, tables and commands as lines of at most a given width; nothing is cut off.

A column is as wide as its texts need where there is room. Else texts wrap, so that the table has few lines; then those
columns go that can be spared; and where a table still has no room, each row becomes a list of names and values.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions
from rich.text import Text

WIDTH, WHOLE = 100, 1 << 20  # columns of a document, and of rows for grep and awk, that go to no terminal
NARROWEST = 20
GAP = "  "
WORD, SHORT = 24, 10  # letters of a word that its column keeps whole; where no column can be spared any more
PROSE = 24  # columns that a last column of longer texts has at least
SUFFIX = 4  # letters of the end of a name that is not parted from it
SAMPLE = 200  # rows that decide on the widths
_PART = re.compile(
    r"[^/\\._:,=&?+-]*[/\\._:,=&?+-]+|[^/\\._:,=&?+-]+"
)  # of a long word, after which it may break
_GLUE = re.compile(
    r" (?![(\[])"
)  # spaces of figures that do not break: `6.13 ms`, but before `[5.90, 6.20]` a line may end


@dataclass(frozen=True)
class Column:
    """`right`: figures. `drop`: of the columns above 0 the highest goes first where there is no room for all."""

    name: str
    right: bool = False
    drop: int = 0


@dataclass(frozen=True)
class Table:
    """Rows of texts below a caption; columns without a name have no heads. In a live display it has the width left."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        heads, body = table_lines(self, options.max_width)
        yield from (Text(line, style="dim", no_wrap=True) for line in heads)
        yield from (Text(line, no_wrap=True) for line in body)


def width_of(console: Console, *, elsewhere: int = WHOLE) -> int:
    """Return the columns of the terminal; where there is none COLUMNS of the environment, else `elsewhere`."""
    known = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return max(NARROWEST, console.width) if known else elsewhere


def show(console: Console, table: Table) -> None:
    """Print a table, its heads dim; into a pipe each row is one line."""
    heads, body = table_lines(table, width_of(console))
    show_lines(console, heads, style="dim")
    show_lines(console, body)


def show_lines(console: Console, lines: Sequence[str], *, style: str = "") -> None:
    """Print lines as they are: neither wrapped again nor read as markup."""
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def wrap(text: str, width: int) -> list[str]:
    """Break a text at its spaces; a word longer than a line after a separator of paths and names, or anywhere."""
    lines, line = [], ""
    for gap, part in _parts(text, width):
        if line and cell_len(line) + len(gap) + cell_len(part) > width:
            lines.append(line)
            line = part
        else:
            line += gap + part if line else part
    return [*lines, line]


def _parts(text: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield the parts of a text between which a line may end, each with the space before it."""
    for word in filter(None, re.split(r"[ \n]+", text)):
        gap = " "
        for part in [word] if cell_len(word) <= width else _split(word):
            for piece in chop_cells(part, width):
                yield gap, piece
                gap = ""


def _split(word: str) -> list[str]:
    """Split a long word behind its separators, but for a short end such as the `.txt` of a path."""
    parts: list[str] = _PART.findall(word)
    return parts if len(parts[-1]) > SUFFIX else [*parts[:-2], "".join(parts[-2:])]


def table_lines(table: Table, width: int) -> tuple[list[str], list[str]]:
    """Lay out a table: the lines of its heads, none where its rows became lists, and those of its rows."""
    columns, rows = list(table.columns), [list(row) for row in table.rows]
    while (widths := _widths(columns, rows, width, WORD)) is None:
        spare = max(range(len(columns)), key=lambda index: columns[index].drop)
        if not columns[spare].drop:
            break
        del columns[spare]
        for row in rows:
            del row[spare]
    widths = widths or _widths(columns, rows, width, SHORT)
    if widths is None:
        return [], _lists(columns, rows, width)
    heads = [wrap(column.name, size) for column, size in zip(columns, widths, strict=True)]
    return (
        _beside(columns, heads, widths) if any(column.name for column in columns) else [],
        [line for row in rows for line in _row_lines(columns, row, widths)],
    )


def _row_lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [
        [line.replace("\xa0", " ") for line in wrap(_glued(cell, size) if column.right else cell, size)]
        for column, cell, size in zip(columns, row, widths, strict=True)
    ]
    return _beside(columns, cells, widths)


def _glued(cell: str, size: int) -> str:
    """Join the words of a figure by spaces that do not break, where each part then fits the column."""
    glued = _GLUE.sub("\xa0", cell)
    return glued if max(map(cell_len, glued.split(" "))) <= size else cell


def _beside(columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    lines = []
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        padded = (_pad(part, w, right=c.right) for c, part, w in zip(columns, parts, widths, strict=True))
        lines.append(GAP.join(padded).rstrip())
    return lines


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, word: int
) -> list[int] | None:
    """Return the widths with which the table has the fewest lines; None where words of `word` letters are cut."""
    room = width - len(GAP) * (len(columns) - 1)
    cells = [[column.name, *(row[i] for row in rows)] for i, column in enumerate(columns)]
    sizes = [[cell_len(cell) for cell in column] for column in cells]
    whole = [max(column) for column in sizes]
    if sum(whole) <= room:
        return whole
    least = [
        max(_least(cell, word, right=column.right and index > 0) for index, cell in enumerate(column_cells))
        for column, column_cells in zip(columns, cells, strict=True)
    ]
    if not columns[-1].right:
        least[-1] = max(least[-1], min(whole[-1], PROSE))
    if sum(least) > room:
        return None
    step = len(rows) // SAMPLE + 1
    shown = list(zip(*(column[:1] + column[1::step] for column in sizes), strict=True))
    choices = [_choices(column, low) for column, low in zip(sizes[:-1], least[:-1], strict=True)]
    most = room - least[-1]
    tried = [
        [*taken, min(room - sum(taken), whole[-1])]
        for taken in itertools.product(*choices)
        if sum(taken) <= most
    ]

    def cost(widths: list[int]) -> tuple[int, int]:
        return sum(_height(sizes, widths) for sizes in shown), widths[-1]

    return min(tried, key=cost)


def _least(cell: str, word: int, *, right: bool) -> int:
    """Return the columns that a cell needs at least, so that only words of more letters than `word` are cut."""
    words = (_GLUE.sub("\xa0", cell) if right else cell).split(" ")
    return max(min(cell_len(part), word) for part in words)


def _choices(sizes: Sequence[int], least: int, most: int = 6) -> list[int]:
    """Return a few widths worth trying: the least one, and sizes of cells up to the longest."""
    ordered = sorted({size for size in sizes if size > least})
    step = -(-len(ordered) // most) or 1
    return [least, *ordered[::-1][::step]]


def _height(sizes: Sequence[int], widths: Sequence[int]) -> int:
    """Estimate the lines of a row, of which words leave a few columns free."""
    return max(
        1 if size <= width else -(-size // max(1, width - 2))
        for size, width in zip(sizes, widths, strict=True)
    )


def _lists(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Write each row as lines of a name and a value, rows apart by an empty line."""
    label = min(max(cell_len(column.name) for column in columns), width // 3)
    lines: list[str] = []
    for number, row in enumerate(rows):
        lines += [""] if number else []
        for column, cell in zip(columns, row, strict=True):
            if cell:
                name = Column(column.name), Column("")
                lines += _row_lines(name, (column.name, cell), (label, width - label - len(GAP)))
    return lines


def command_lines(command: str, width: int) -> list[str]:
    """Break a shell command so that it still runs when all its lines are copied: each but the last ends in a backslash.

    A word longer than a line goes on at the start of the next one.
    """
    lines, line = [], ""
    for word in shlex.split(command):
        quoted = shlex.quote(word)
        if line and cell_len(line) + 1 + cell_len(quoted) <= width - 2:
            line += f" {quoted}"
            continue
        if line:
            lines.append(f"{line} \\")
        indent = "    " if lines else ""
        while cell_len(indent + shlex.quote(word)) > width - 2 and len(word) > 1:
            lengths = range(2, min(len(word), width))
            kept = max((n for n in lengths if cell_len(shlex.quote(word[:n])) <= width - 6), default=1)
            lines.append(f"{indent}{shlex.quote(word[:kept])}\\")
            word, indent = word[kept:], ""
        line = indent + shlex.quote(word)
    return [*lines, line]
