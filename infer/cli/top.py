"""`infer top`: a live table of the models of a running server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..errors import NotUsableError, UsageError
from ..report.rendering.formatting import seconds, size
from ..report.rendering.text_layout import Column, Table
from ..serve.observability.prometheus_text import percentile

WINDOW = 10.0  # seconds that percentiles cover
RATE = 3.0  # seconds that rates cover
HEADS = ("model", "per second", "p50", "p95", "p99", "waiting", "running", "batch", "KV", "refused", "failed")
SPARE = {"batch": 1, "p95": 2}  # columns that a narrow terminal does not show
Reading = Mapping[str, Any]


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="address of a running server")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="INFER_API_KEY", help="key, if the server asks for one")
    ] = None,
    interval: Annotated[float, typer.Option(help="seconds between two readings", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one table and exit")] = False,
) -> None:
    """Watch a running server: throughput, latency, queue, batches and memory of each model."""
    watch(url, api_key, interval, once=once)


def read(url: str, key: str | None) -> Reading:
    """Read /ops/now once; raises `UsageError` for a wrong address, `NotUsableError` when no server answers."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"expected an address like http://127.0.0.1:8000, got {url!r}")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/ops/now", headers=headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        hint = "Give --api-key" if error.code == 401 else "Is this the address of an infer server?"
        raise NotUsableError(f"{url} answered {error.code}", hint=hint) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NotUsableError(
            f"no server answers at {url} ({reason})", hint="Start one: infer serve ARTIFACT"
        ) from error


class Readings:
    """Readings of the last seconds, oldest first."""

    def __init__(self) -> None:
        self.all: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """Append a reading; drop those older than the window."""
        if self.all and reading["time"] <= self.all[-1]["time"]:
            self.all.clear()  # the server began anew
        self.all.append(reading)
        while self.all[0]["time"] < reading["time"] - WINDOW - 1:
            self.all.pop(0)

    def before(self, span: float) -> Reading:
        """Return the newest reading that is at least `span` seconds old, else the oldest."""
        now = self.all[-1]["time"]
        return next((r for r in reversed(self.all) if now - r["time"] >= span), self.all[0])

    def row(self, name: str) -> list[str]:
        """Format the cells of one model, in the order of `HEADS`."""
        now, then = self.all[-1]["models"][name], self.before(RATE)["models"].get(name)
        then = then or now
        passed = self.all[-1]["time"] - self.before(RATE)["time"]
        text = now["kv_pages"] is not None
        done = "tokens" if text else "rows"
        rate = f"{(now[done] - then[done]) / passed:,.1f} {done}" if passed > 0 else "-"
        old = self.before(WINDOW)["models"].get(name, {}).get("request_times", {})
        counts = {int(i): n - old.get(i, 0) for i, n in now["request_times"].items() if n > old.get(i, 0)}
        used, pages = now["kv_pages"] or (0, 0)
        failed = sum(n for code, n in now["requests"].items() if code >= "500" and code != "503")
        return [
            name,
            rate,
            *(seconds(percentile(counts, share)) for share in (0.5, 0.95, 0.99)),
            str(now["waiting"]),
            str(now["running"]),
            _batch(now, then),
            f"{100 * used / pages:.0f} %" if pages else "",
            str(sum(now["rejected"].values())),
            str(failed + now["late"]),
        ]

    def table(self, url: str) -> Group:
        """Make the table of all models, from the newest reading and those before it."""
        now = self.all[-1]
        title = f"{url} · {now['state']} · {now['active']} requests · {size(now['memory'])}"
        columns = [Column(head, right=head != "model", drop=SPARE.get(head, 0)) for head in HEADS]
        return Group(Text(title, style="bold"), Table(columns, list(map(self.row, now["models"]))))


def _batch(now: Reading, then: Reading) -> str:
    """Format the mean rows of recent batches, of a language model the mean tokens of recent steps."""
    if now["kv_pages"] is not None:
        steps = now["steps"] - then["steps"]
        return f"{(now['tokens'] - then['tokens']) / steps:.1f}" if steps else "-"
    counts = {int(rows): n - then["batches"].get(rows, 0) for rows, n in now["batches"].items()}
    batches = sum(counts.values())
    return f"{sum(rows * n for rows, n in counts.items()) / batches:.1f}" if batches else "-"


def watch(url: str, key: str | None, interval: float, *, once: bool) -> None:
    """Print a live table until interrupted; with `once` one table of two readings."""
    console, readings = Console(), Readings()
    readings.add(read(url, key))
    if once:
        time.sleep(interval)
        readings.add(read(url, key))
        console.print(readings.table(url))
        return
    with Live(readings.table(url), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            readings.add(read(url, key))
            live.update(readings.table(url), refresh=True)
