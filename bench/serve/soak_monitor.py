"""Monitor of the server's processes for `soak.py`: memory every 5 s, and what is left at rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench.serve.mixed_traffic import Client, samples
from bench.serve.theil_sen import Point, above_mean, per_minute, theil_sen

EVERY = 5.0  # seconds between two readings
REST_EVERY, REST_SECONDS = 300.0, 4.0
GRACE_SECONDS = 5.0  # in which requests that a kill met may still be told
MB, HOUR = 1e6, 3600.0
MOST_SLOPE, MOST_ABOVE = 1.0, 20.0  # MB/h, MB
LEFT = ("infer_requests_running", "infer_requests_waiting", "infer_kv_cache_usage_ratio")


@dataclass
class ProcessLifetime:
    """One process from its start to its end; `role` is equal in every life."""

    role: str
    process: psutil.Process
    points: list[Point] = field(default_factory=list)


class Watcher:
    """Reader and killer of the server's processes; `resting` tells clients to pause.

    The first child processes are digits' workers, the last is pydoc_lm's; one that comes later takes the place of the
    one that is gone.
    """

    def __init__(
        self, pid: int, client: Client, *, minutes: float, kill_minutes: float, say: Callable[[str], None]
    ) -> None:
        self.client, self.say, self.resting = client, say, False
        self.began, self.warm = time.monotonic(), min(0.5 * minutes, 15.0) * 60
        self._kill_every, self._last_kill = 60 * kill_minutes, self.began
        self._front = psutil.Process(pid)
        workers = sorted(self._front.children(), key=lambda process: process.pid)
        roles = [*(f"worker of digits, {i}" for i in range(len(workers) - 1)), "worker of pydoc_lm"]
        self.living = {"front": ProcessLifetime("front", self._front)}
        self.living |= {
            role: ProcessLifetime(role, process) for role, process in zip(roles, workers, strict=True)
        }
        self.lives = list(self.living.values())
        self.targets = ["worker of pydoc_lm", "worker of digits, 0"]
        self.kills, self.rests = 0, list[tuple[float, dict[str, float]]]()
        self.recoveries: list[float] = []
        self._recovering: asyncio.Task[None] | None = None
        self._cpu = self._spent()

    @property
    def recovering(self) -> bool:
        """True while a killed worker's model is not ready again, or was not a moment ago."""
        return self._recovering is not None and not self._recovering.done()

    async def _recover(self) -> None:
        while (await self.client.get("/ready")).status == 200 and time.monotonic() - self._last_kill < 5:
            await asyncio.sleep(0.02)
        while (await self.client.get("/ready")).status != 200:
            await asyncio.sleep(0.05)
        self.recoveries.append(time.monotonic() - self._last_kill)
        self.say(f"ready again after {self.recoveries[-1]:.1f} s")
        await asyncio.sleep(GRACE_SECONDS)

    async def run(self, until: float, quiet: Callable[[], bool]) -> None:
        """Read, rest and kill until then, and rest once more."""
        rested = self.began + self.warm - REST_EVERY  # the first rest ends the warm-up
        while (now := time.monotonic()) < until:
            self._read(now - self.began)
            if now - rested >= REST_EVERY and not self.recovering:
                rested = now
                await self._rest(quiet)
            if now - self._last_kill >= self._kill_every and until - now > 30:
                self._kill()
            await asyncio.sleep(EVERY)
        await self._rest(quiet)

    def _read(self, second: float) -> None:
        self._replace()
        for life in self.living.values():
            with contextlib.suppress(psutil.Error):
                life.points.append((second, life.process.memory_info().rss / MB))

    def _replace(self) -> None:
        """Give the roles of processes that are gone to the new ones."""
        gone = [role for role, life in self.living.items() if not life.process.is_running()]
        known = {life.process.pid for life in self.living.values()}
        new = [child for child in self._front.children() if child.pid not in known] if gone else []
        for role, process in zip(gone, new, strict=False):
            self.living[role] = ProcessLifetime(role, process)
            self.lives.append(self.living[role])

    def _kill(self) -> None:
        role = self.targets[self.kills % len(self.targets)]
        self.say(f"{(time.monotonic() - self.began) / 60:.1f} min: kill -9 {role}")
        os.kill(self.living[role].process.pid, signal.SIGKILL)
        self.kills, self._last_kill = self.kills + 1, time.monotonic()
        self._recovering = asyncio.create_task(self._recover())

    async def _rest(self, quiet: Callable[[], bool]) -> None:
        self.resting = True
        while not quiet():
            await asyncio.sleep(0.05)
        await asyncio.sleep(REST_SECONDS)
        self._replace()
        found: dict[str, float] = {}
        for role, life in self.living.items():
            found[f"{role}: open files"] = life.process.num_fds()
            found[f"{role}: threads"] = life.process.num_threads()
        scraped = samples((await self.client.get("/metrics")).body)
        for name in LEFT:
            found[name] = sum(value for key, value in scraped.items() if key.startswith(f"{name}{{"))
        self.rests.append((time.monotonic() - self.began, found))
        rss = ", ".join(
            f"{role} {life.points[-1][1]:.1f}" for role, life in self.living.items() if life.points
        )
        self.say(f"{(time.monotonic() - self.began) / 60:.1f} min: MB {rss}")
        self.resting = False

    def _spent(self) -> float:
        total = 0.0
        for life in self.living.values():
            with contextlib.suppress(psutil.Error):
                total += sum(life.process.cpu_times()[:2])
        return total

    def found(self) -> dict[str, Any]:
        """Return figures, and the sentences of what is `broken`."""
        memory = {role: self._memory(role) for role in self.living}
        broken = [
            f"{role} grows by {row['slope']:.2f} MB/h ({row['low']:.2f} to {row['high']:.2f})"
            for role, row in memory.items()
            if row["verdict"] == "no"
        ]
        broken += [
            f"{role}: the highest is {row['above_mean']:.1f} MB above the mean"
            for role, row in memory.items()
            if row["above_mean"] > MOST_ABOVE
        ]
        first, last = self._first_half(), self.rests[-1][1]
        broken += [
            f"{name}: {first[name]:g} in the first half, {value:g} at the end"
            for name, value in last.items()
            if value > (0 if name in LEFT else first.get(name, value))
        ]
        return {
            "kills": self.kills,
            "recoveries": self.recoveries,
            "memory": memory,
            "rest": {name: (first.get(name, value), value) for name, value in last.items()},
            "rests": self.rests,
            "cpu_percent": 100 * (self._spent() - self._cpu) / (time.monotonic() - self.began),
            "rss": {f"{life.role} {life.process.pid}": life.points for life in self.lives},
            "broken": broken,
        }

    def _first_half(self) -> dict[str, float]:
        """Return the maximum at rest in the first half of the rests: pools have their threads then."""
        half = [found for _, found in self.rests[: max(len(self.rests) // 2, 1)]]
        return {name: max(found.get(name, 0) for found in half) for name in half[-1]}

    def _memory(self, role: str) -> dict[str, Any]:
        """Return memory figures of the part of every life after its own warm-up."""
        lives = []
        for life in (life for life in self.lives if life.role == role and life.points):
            begin = life.points[0][0] + self.warm
            lives.append([point for point in life.points if point[0] >= begin])
        minutes = [per_minute(life) for life in lives if life]
        row: dict[str, Any] = {
            "rss": self.living[role].points[-1][1],
            "above_mean": max((above_mean(life) for life in lives if life), default=0.0),
            "verdict": "too short",
        }
        if (found := theil_sen(minutes)) is not None:
            slope, low, high = (HOUR * value for value in found)
            verdict = "no" if low > MOST_SLOPE else "yes" if high <= MOST_SLOPE else "not shown"
            row |= {"slope": slope, "low": low, "high": high, "verdict": verdict}
        return row
