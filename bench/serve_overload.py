"""How the server holds more than it can do: the overload ladder, a step, a square wave, and clients that insist.

    python bench/serve_overload.py [ARTIFACT.infer] [--seconds 20] [--seeds 1] [--rungs 0.5,1,1.5,2,5,10]

Open loop: `bench/serve_openloop.py` sends one-row requests when a Poisson process says so. C is the highest rate, found
by bisection, at which p99 <= SLO and nothing is refused (1 % may be either); SLO = 3 x p99 at 0.7 C. Clients say
how long they wait (X-Request-Timeout-Ms: 0.9 SLO); `--silent` adds rungs on which they don't. Goodput counts answers
that are right and came within the SLO, measured from when the request was due, not from when it left. Without an
artifact, MiniLM is made first.

The model gets one thread: on two cores the other one belongs to front and client, so that C is the model's limit and
not theirs. Bars are those of reference figures for a two-core machine; exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from serve_client import check, encode, run
from serve_overload_figures import back_after, figures, holds, markdown, missed, p99, took
from serve_roles import ask, make_minilm, samples, started

from serve import say, write

CAUTION = 0.9  # of the SLO is the time that clients allow: the rest is for the way
GRACE = 1.0  # seconds after its deadline at which a request is lost
SETTLE = 1.0


class Client:
    """The process that sends."""

    def __init__(self, running: subprocess.Popen[str], folder: Path, *, streams: bool = False) -> None:
        self.running, self.path, self.streams = running, folder / "rows.npy", streams

    def fire(
        self, phases: list[list[float]], *, seed: int, timeout: float = 0.0, retries: int = 0
    ) -> np.ndarray:
        """Rows as `serve_openloop` says."""
        command = {"phases": phases, "timeout": timeout, "retries": retries, "seed": seed}
        command |= {"patience": (timeout or 60.0) + GRACE, "save": str(self.path), "streams": self.streams}
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.running.stdin.write(json.dumps(command) + "\n")
        self.running.stdin.flush()
        if self.running.stdout.readline() != "done\n":
            raise SystemExit("the client died")
        time.sleep(SETTLE)
        return np.load(self.path)


@contextmanager
def client(port: int, requests: list[bytes], expected: np.ndarray | None, folder: Path) -> Iterator[Client]:
    """`expected`: answers as rows of float32; None: the requests are for streams of text."""
    path, script = folder / "requests.npz", Path(__file__).parent / "serve_openloop.py"
    data, right = np.frombuffer(b"".join(requests), np.uint8), np.zeros(0) if expected is None else expected
    np.savez(path, data=data, sizes=[len(one) for one in requests], expected=right.astype("<f4"))
    command = [sys.executable, str(script), str(port), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            if running.stdout.readline() != "ready\n":
                raise SystemExit("the client did not start")
            yield Client(running, folder, streams=expected is None)
        finally:
            running.terminate()


def capacity(fire: Client, guess: float, seconds: float) -> tuple[float, float]:
    """C and the SLO, by bisection between 0.6 and 1.1 of what closed-loop clients reached."""
    low, high = 0.6 * guess, 1.1 * guess
    for around in range(2):  # the SLO depends on C, and C on the SLO
        rate = low if not around else low * 0.7
        slo = 3 * p99(took(fire.fire([[2 * seconds, rate]], seed=100 + around)))
        say(f"SLO {1e3 * slo:.0f} ms, from p99 at {rate:.0f}/s")
        if around:
            return low, slo
        for probe in range(5):
            middle = (low + high) / 2
            if holds(fire.fire([[seconds, middle]], seed=110 + probe, timeout=0.0), slo):
                low = middle
            else:
                high = middle
            say(f"C is between {low:.1f} and {high:.1f}/s")
    raise AssertionError


def ladder(
    fire: Client,
    c: float,
    slo: float,
    arguments: argparse.Namespace,
    told: dict[str, float],
    *,
    peaks: bool = True,
) -> dict[str, Any]:
    """Figures by rung; `told`: what clients say; `peaks`: also those who insist, the step and the wave."""
    seconds, found = arguments.seconds, dict[str, Any]()

    def rung(name: str, rate: float, **how: Any) -> None:
        runs = []
        for seed in arguments.seeds:
            say(f"{name}: {rate:.0f}/s")
            runs.append(fire.fire([[seconds, rate]], seed=seed, **how))
        parts = [figures(rows, seconds, slo) for rows in runs]
        found[name] = {key: round(float(np.median([one[key] for one in parts])), 3) for key in parts[0]}

    for times in arguments.rungs:
        rung(f"{times:g} C", times * c, **told)
    for times in arguments.silent:
        rung(f"{times:g} C, no timeout", times * c)
    if peaks:
        found |= insist(fire, c, slo, arguments, told)
    best = max(found[f"{times:g} C"]["goodput"] for times in arguments.rungs)
    for row in found.values():
        row["share"] = round(row["goodput"] / min(best, row["offered"]), 3)
    return found


def insist(
    fire: Client, c: float, slo: float, arguments: argparse.Namespace, told: dict[str, float]
) -> dict[str, Any]:
    """Figures of clients that ask again at once, of a step and of a wave."""
    seconds, found, seed = arguments.seconds, dict[str, Any](), arguments.seeds[0]
    say(f"3 C, 3 retries at once: {3 * c:.0f}/s")
    rows = fire.fire([[seconds, 3 * c]], seed=seed, **told, retries=3)
    found["3 C, 3 retries at once"] = figures(rows, seconds, slo)
    half = seconds / 2
    say("step")
    rows = fire.fire([[seconds, 0.5 * c], [half, 3 * c], [half, 0.5 * c]], seed=seed, **told)
    before = p99(took(rows[rows[:, 0] < seconds]))
    back = back_after(rows, 1.5 * seconds, 2 * seconds, before)
    found["step 0.5, 3, 0.5 C"] = {**figures(rows, 2 * seconds, slo), "recovery": back}
    say("square wave")
    wave = [[5.0, 0.5 * c], [5.0, 3 * c]] * 3
    rows = fire.fire([*wave, [5.0, 0.5 * c]], seed=seed, **told)
    backs = [back_after(rows, begin, begin + 5, before) for begin in (10.0, 20.0, 30.0)]
    found["wave 0.5, 3 C each 5 s"] = {**figures(rows, 35.0, slo), "recovery": max(backs)}
    return found


def measure(artifact: str, arguments: argparse.Namespace) -> tuple[float, float, dict[str, Any]]:
    name = json.loads((Path(artifact) / "manifest.json").read_text())["name"]
    requests = [encode(name, one)["binary"] for one in samples(artifact, 64)]
    with tempfile.TemporaryDirectory() as work:
        with started("model", artifact) as (_, model):
            ask(model, save=f"{work}/expected.npy")
        expected = np.load(f"{work}/expected.npy")
        with started("infer", artifact) as (port, _):
            check(port, "binary", requests, expected)
            guess = max(run(port, requests, 8, 400)["rate"] for _ in range(2))
            say(f"closed loop: {guess:.0f}/s")
            with client(port, requests, expected, Path(work)) as fire:
                c, slo = capacity(fire, guess, arguments.seconds / 2)
                return c, slo, ladder(fire, c, slo, arguments, {"timeout": CAUTION * slo})


def parsed(description: str | None, rungs: list[float], silent: list[float]) -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rung")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument("--rungs", type=numbers, default=rungs)
    parser.add_argument("--silent", type=numbers, default=silent)
    return parser.parse_args()


def main() -> int:
    arguments = parsed(__doc__, [0.5, 1.0, 1.5, 2.0, 5.0, 10.0], [2.0])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        artifact = arguments.artifact or make_minilm(folder, say)
        c, slo, found = measure(artifact, arguments)
    words = missed(found, slo)
    table = {"capacity": round(c, 2), "slo_ms": round(1e3 * slo, 1), "seconds": arguments.seconds}
    what = "MiniLM, one-row requests of many lengths, the model on one thread of its process; clients allow "
    text = markdown(f"{what}{CAUTION:g} SLO", c, slo, found, words)
    write("serve-overload", {**table, "rows": found, "missed": words}, text)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
