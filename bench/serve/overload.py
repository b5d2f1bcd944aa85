"""Goodput and latency above capacity: a ladder of overload, a step, a square wave, and clients that retry.

    python -m bench.serve.overload [ARTIFACT.infer] [--seconds 2.5] [--rounds 9] [--rungs 0.5,1,1.5,2,5,10] [--steady]

Open loop: `open_loop_client.py` sends one-row requests at the times of a Poisson process. C is the highest rate, found
by bisection, at which p99 <= SLO and nothing is refused (1 % may be either); SLO = 3 x p99 at 0.7 C. Clients say
how long they wait (X-Request-Timeout-Ms: 0.9 SLO); `--silent` adds rungs on which they don't. Goodput counts answers
that are right and came within the SLO, measured from when the request was due, not from when it left; the first
`LEAD` seconds, or the SLO, don't count. Each counts as much as the model takes for it alone, over the mean: sentences
are 8 to 128 tokens long, so that counted alike a run's figure would say which ones it drew, and turning the long ones
away would pay. Without an artifact, MiniLM is made first.

The rungs take turns, in an order drawn anew each round; runs are short, so that a round is over before the machine is
another one, and there are many (see `undisturbed.py`). A rung's share is its goodput in all rounds over that of the
best rung (or over what was offered where that is less); its interval, of nine tenths, is from rounds drawn again and
again. The best of several noisy means is taken for the truth, which makes the bars a little harder. A bar is missed
when the share lies below it, whatever its interval. More `--rounds` decide more.

The model gets one thread: on two cores the other one belongs to front and client, so that C is the model's limit and
not theirs. Bars are those of reference figures for a two-core machine; exit code 1 when one is missed. `--steady`
leaves out step, wave and those who insist.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve.open_loop_client import client
from bench.serve.overload_figures import back_after, holds, markdown, missed, p99, share, together, took
from bench.serve.request_forms import check, encode
from bench.serve.server_processes import REQUESTS, model_alone, samples, started
from bench.serve.undisturbed import UndisturbedRuns
from bench.shared.command_line import parser_of
from bench.shared.example_models import artifact
from bench.shared.results import progress, write_results

CAUTION = 0.9  # of the SLO is the time that clients allow: the rest is for the way
LEAD = 0.6  # seconds of a run, or the SLO where that is longer, that do not count: the queue fills
INSIST = 8.0  # seconds of what is not of the ladder
FLOOD = 1.0, 3000.0  # seconds, requests a second: how many are answered in one go is the first guess at C


def capacity(alone: UndisturbedRuns, low: float, high: float, seconds: float) -> tuple[float, float]:
    """Find C by bisection, and the SLO."""
    for around in range(2):  # the SLO depends on C, and C on the SLO
        rate = low if not around else low * 0.7
        slo = 3 * p99(took(alone.fire([[2 * seconds, rate]], seed=100 + around)))
        progress(f"SLO {1e3 * slo:.0f} ms, from p99 at {rate:.0f}/s")
        if around:
            return low, slo
        for probe in range(5):
            middle = (low + high) / 2
            both = [alone.fire([[seconds, middle]], seed=110 + 2 * probe + i) for i in range(2)]
            if holds(np.concatenate(both), slo):
                low = middle
            else:
                high = middle
            progress(f"C is between {low:.1f} and {high:.1f}/s")
    raise AssertionError


def guess(alone: UndisturbedRuns, seconds: float, rate: float) -> float:
    """Return answers a second at a load of at least twice the capacity."""
    while True:
        rows = alone.fire([[seconds, rate]], seed=9)
        good = rows[rows[:, 3] == 200]
        found = len(good) / float(np.nanmax(good[:, 2]))
        progress(f"{len(good)} of {len(rows)} at once: {found:.0f}/s, p99 {p99(took(rows)):.2f} s")
        if found < rate / 2:
            return found
        rate *= 2


def ladder(
    alone: UndisturbedRuns, c: float, slo: float, arguments: argparse.Namespace, told: dict[str, float]
) -> dict[str, Any]:
    """Measure figures by rung; `told`: the deadline that clients send."""
    seconds, random = arguments.seconds, np.random.default_rng(arguments.seed)
    rungs = {f"{times:g} C": (times * c, told) for times in arguments.rungs}
    steady = list(rungs)
    rungs |= {f"{times:g} C, no timeout": (times * c, {}) for times in arguments.silent}
    lead = max(LEAD, slo)
    runs: dict[str, list[np.ndarray]] = {name: [] for name in rungs}
    for number in range(arguments.rounds):
        for name in random.permutation(list(rungs)):
            rate, how = rungs[name]
            progress(f"round {number + 1}, {name}: {rate:.0f}/s")
            seed = arguments.seed * 1000 + number
            rows = alone.fire([[lead + seconds, rate]], seed=seed, **how)
            runs[name].append(rows[rows[:, 0] >= lead])
    found = {name: together(parts, seconds, slo) for name, parts in runs.items()}
    if not arguments.steady:
        found |= insist(alone, c, slo, arguments, told)
    share(found, steady)
    return found


def insist(
    alone: UndisturbedRuns, c: float, slo: float, arguments: argparse.Namespace, told: dict[str, float]
) -> dict[str, Any]:
    """Measure clients that retry at once, a step and a wave."""
    seconds, found, seed = INSIST, dict[str, Any](), arguments.seed
    progress(f"3 C, 3 retries at once: {3 * c:.0f}/s")
    rows = alone.fire([[seconds, 3 * c]], seed=seed, **told, retries=3)
    found["3 C, 3 retries at once"] = together([rows], seconds, slo)
    half = seconds / 2
    progress("step")
    rows = alone.fire([[seconds, 0.5 * c], [half, 3 * c], [half, 0.5 * c]], seed=seed, **told)
    before = p99(took(rows[rows[:, 0] < seconds]))
    back = back_after(rows, 1.5 * seconds, 2 * seconds, before)
    found["step 0.5, 3, 0.5 C"] = {**together([rows], 2 * seconds, slo), "recovery": back}
    progress("square wave")
    wave = [[5.0, 0.5 * c], [5.0, 3 * c]] * 2
    rows = alone.fire([*wave, [5.0, 0.5 * c]], seed=seed, **told)
    backs = [back_after(rows, begin, begin + 5, before) for begin in (10.0, 20.0)]
    found["wave 0.5, 3 C each 5 s"] = {**together([rows], 25.0, slo), "recovery": max(backs)}
    return found


def measure(artifact: str, arguments: argparse.Namespace) -> tuple[float, float, dict[str, Any], str]:
    name = json.loads((Path(artifact) / "manifest.json").read_text())["name"]
    requests = [encode(name, one)["binary"] for one in samples(artifact, REQUESTS)]
    with model_alone(artifact) as model:
        expected, costs = model.call("expected"), np.array(model.call("seconds"))
    with started("infer", artifact) as (port, _), client(port, requests, expected, costs) as fire:
        check(port, "binary", requests, expected)
        alone = UndisturbedRuns(fire)
        about = guess(alone, *FLOOD)
        c, slo = capacity(alone, 0.5 * about, 1.1 * about, arguments.seconds)
        told = {"timeout": CAUTION * slo}
        found = ladder(alone, c, slo, arguments, told)
        return c, slo, found, alone.note


def parsed(description: str | None, rungs: list[float], silent: list[float]) -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",") if part]

    parser = parser_of(description)
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each rung in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steady", action="store_true", help="no step, no wave, nobody who insists")
    parser.add_argument("--rungs", type=numbers, default=rungs)
    parser.add_argument("--silent", type=numbers, default=silent)
    return parser.parse_args()


def main() -> int:
    arguments = parsed(__doc__, [0.5, 1.0, 1.5, 2.0, 5.0, 10.0], [2.0])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.artifact or artifact("minilm", folder, backend="ort")
        c, slo, found, note = measure(path, arguments)
    words = missed(found, slo)
    table = {"capacity": round(c, 2), "slo_ms": round(1e3 * slo, 1), "seconds": arguments.seconds}
    table |= {"rounds": arguments.rounds}
    what = "MiniLM, one-row requests of many lengths, the model on one thread of its process; clients allow "
    text = markdown(f"{what}{CAUTION:g} SLO; {arguments.rounds} rounds, {note}", c, slo, found, words)
    write_results("serve-overload", {**table, "rows": found, "missed": words}, text)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
