"""Where figures are kept: bench/results/NAME-DATE-CPU.json, so that two machines of one day stand side by side."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
COMMON = re.compile(r"\((r|tm)\)|\b(cpu|processor|genuine)\b", re.IGNORECASE)


def machine() -> str:
    """The CPU's name as part of a file's name: `Intel(R) Xeon(R) Processor @ 2.50GHz` is `intel-xeon-2-50ghz`."""
    from infer import device  # brings torch, which some benchmarks must not have before they measure

    return re.sub(r"[^a-z0-9]+", "-", COMMON.sub("", device.fingerprint("cpu")["cpu"]).lower()).strip("-")


def result_path(name: str) -> Path:
    """Of what is measured here today."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / f"{name}-{datetime.date.today()}-{machine()}.json"
