"""Result files: bench/results/NAME-DATE-CPU.json and .md, one pair for each benchmark, day and model of processor."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.shared.repository import RESULTS, ROOT

COMMON = re.compile(r"\((r|tm)\)|\b(cpu|processor|genuine)\b", re.IGNORECASE)
CPUINFO = Path("/proc/cpuinfo")
Row = TypeVar("Row")


def machine() -> str:
    """Return the processor's name for a file name: brand, then family and model, e.g. `amd-epyc-19h-01h`.

    Virtual machines hide the model in the brand, and one brand holds generations of very different speed.
    """
    from infer import device  # brings torch, which some benchmarks must not have before they measure

    return file_name_of(device.fingerprint("cpu")["cpu"], CPUINFO.read_text() if CPUINFO.exists() else "")


def file_name_of(brand: str, cpuinfo: str) -> str:
    """Return the name in files of a brand and of the text of /proc/cpuinfo, which has no numbers on ARM."""
    numbers = (re.search(rf"^{key}\s*: (\d+)$", cpuinfo, re.MULTILINE) for key in ("cpu family", "model"))
    words = [COMMON.sub("", brand), *(f"{int(found[1]):02x}h" for found in numbers if found)]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def machine_header(**more: Any) -> dict[str, Any]:
    """Return the head of a result file: date, machine, versions of libraries, and `more`."""
    from infer import device

    found = {"machine": device.fingerprint("cpu"), "versions": device.versions()}
    return {"date": str(datetime.date.today()), **found, **more}


def heading(head: dict[str, Any]) -> str:
    """Return the first line of a page: processor, threads, date, versions."""
    threads = [f"{head['threads']} threads"] if "threads" in head else []
    versions = [f"{name} {version}" for name, version in head["versions"].items()]
    return f"{', '.join([head['machine']['cpu'], *threads, head['date'], *versions])}\n\n"


def result_path(name: str) -> Path:
    """Return today's result file of `name` on this machine; the folder is made."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / f"{name}-{datetime.date.today()}-{machine()}.json"


def write_results(name: str, found: dict[str, Any], table: str) -> None:
    """Write both result files of a benchmark of a server, which shares the machine with its client; print the table."""
    head = {**machine_header(), "load": round(os.getloadavg()[1], 1)}
    path = result_path(name)
    path.write_text(json.dumps({**head, **found}, indent=1) + "\n")
    note = f"{head['machine']['cpu']}; client, servers and model share its cores; "
    note += f"load average {head['load']}; {head['date']}\n\n"
    path.with_suffix(".md").write_text(note + table)
    print(note + table)
    print(f"written: {path.relative_to(ROOT)}")


class TodaysRows(Generic[Row]):
    """Rows of today's result file on this machine: a row that is measured again replaces the former one.

    `kind`: type of a row; `page`: text of all rows, under the head; `key`: what rows are told apart by; `order`: the
    sort key of the page; `field`: name of the list in the JSON file; `head`: more than `machine_header` says.
    """

    def __init__(
        self,
        name: str,
        kind: type[Row],
        page: Callable[[list[Row]], str],
        *,
        key: Callable[[Any], Hashable] = lambda row: row.key,
        order: Callable[[Row], Any] = lambda row: 0,
        field: str = "rows",
        **head: Any,
    ) -> None:
        self.path, self.head = result_path(name), machine_header(**head)
        self._kind, self._page, self._key, self._order, self._field = kind, page, key, order, field

    def read(self) -> list[Row]:
        """Return the rows of the file, which another process may be filling too; none of another machine."""
        import msgspec

        if not self.path.exists():
            return []
        before = json.loads(self.path.read_text())
        same = before["machine"] == json.loads(json.dumps(self.head["machine"]))
        return msgspec.convert(before[self._field], list[self._kind]) if same else []  # type: ignore[name-defined]

    def keep(self, rows: Iterable[Row]) -> list[Row]:
        """Put rows into both files, which no rows at all leave alone; return all of them in order."""
        import msgspec

        merged = {self._key(row): row for row in [*self.read(), *rows]}
        known = sorted(merged.values(), key=self._order)
        if not known:
            return []
        found = {**self.head, self._field: msgspec.to_builtins(known)}
        self.path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        self.path.with_suffix(".md").write_text(heading(self.head) + self._page(known))
        return known


def progress(text: str) -> None:
    """Print one line on stderr."""
    print(text, file=sys.stderr, flush=True)


def exit_code(missed: list[str]) -> int:
    """Print the bars that were missed and return the exit code: 1 if there are any."""
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0
