"""Names and headers of result files: bench/results/NAME-DATE-CPU.json, so that machines do not overwrite each other."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

from bench.shared.repository import RESULTS

COMMON = re.compile(r"\((r|tm)\)|\b(cpu|processor|genuine)\b", re.IGNORECASE)


def machine() -> str:
    """Return the CPU's name for use in a file name, e.g. `intel-xeon-2-50ghz`."""
    from infer import device  # brings torch, which some benchmarks must not have before they measure

    return re.sub(r"[^a-z0-9]+", "-", COMMON.sub("", device.fingerprint("cpu")["cpu"]).lower()).strip("-")


def machine_header(**more: Any) -> dict[str, Any]:
    """Return the head of a result file: date, machine, versions of libraries, and `more`."""
    from infer import device

    found = {"machine": device.fingerprint("cpu"), "versions": device.versions()}
    return {"date": str(datetime.date.today()), **found, **more}


def result_path(name: str) -> Path:
    """Return today's result file of `name` on this machine; the folder is made."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / f"{name}-{datetime.date.today()}-{machine()}.json"
