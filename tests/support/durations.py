"""Seconds that tests took in a whole run, and from them the tiers of `make`: fast, usual and nightly.

    python -m pytest … --junitxml=report.xml && python -m tests.support.durations report.xml

writes `tests/durations.json`: the seconds of each file, and of its functions that took one or more, with all of their
parameters. `fast` is the files of quick tests; `usual` runs of each function as many parameters as fit into a few
seconds, evenly chosen, and `nightly` what that leaves out.
"""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

FILE = Path(__file__).resolve().parents[1] / "durations.json"
TIERS = ("fast", "usual", "nightly", "all")
LEAST = 1.0  # seconds of a function that is written down
FAST_FILE = 2.0  # seconds of a file of the fast tier
USUAL_FUNCTION = 4.0  # seconds of a function of the usual tier, with all parameters that it runs

Item = TypeVar("Item")
Seconds = Mapping[str, Mapping[str, float]]  # file → function → seconds, that of the file under ""


@cache
def known() -> Seconds:
    """Return the seconds that were written down."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}  # type: ignore[no-any-return]


def is_quick(file: str, seconds: Seconds) -> bool:
    """Return whether a file belongs to the fast tier; what was never measured does."""
    return seconds.get(file, {}).get("", 0.0) <= FAST_FILE


def chosen(functions: Mapping[tuple[str, str], Sequence[Item]], tier: str, seconds: Seconds) -> list[Item]:
    """Return the tests of a tier, given the tests of each function of a file: one for each of its parameters."""
    kept: list[Item] = []
    for (file, function), items in functions.items():
        usual = set(_fitting(range(len(items)), seconds.get(file, {}).get(function, 0.0)))
        if tier in ("usual", "nightly"):
            kept += [item for index, item in enumerate(items) if (index in usual) == (tier == "usual")]
        elif tier == "all" or is_quick(file, seconds):
            kept += items
    return kept


def _fitting(indices: Sequence[int], seconds: float) -> Sequence[int]:
    """Return as many of the indices, evenly chosen, as fit into `USUAL_FUNCTION` where all take so many seconds."""
    if seconds <= USUAL_FUNCTION:
        return indices
    count = math.floor(USUAL_FUNCTION / seconds * len(indices))
    return indices[:: math.ceil(len(indices) / count)] if count else ()


def read(report: Iterable[ElementTree.Element]) -> dict[str, dict[str, float]]:
    """Sum the seconds of the test cases of a report by file and function, leaving out functions below `LEAST`."""
    seconds: dict[str, dict[str, float]] = {}
    for case in report:
        file = seconds.setdefault(case.attrib["classname"].removeprefix("tests.").replace(".", "/"), {})
        for name in ("", case.attrib["name"].partition("[")[0]):
            file[name] = file.get(name, 0.0) + float(case.attrib["time"])
    return {
        file: {name: round(took, 1) for name, took in sorted(functions.items()) if not name or took >= LEAST}
        for file, functions in sorted(seconds.items())
    }


if __name__ == "__main__":
    cases = ElementTree.parse(sys.argv[1]).iter("testcase")  # noqa: S314 - our own file
    FILE.write_text(json.dumps(read(cases), indent=1) + "\n")
