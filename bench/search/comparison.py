"""A search within budgets against trying everything, and against optimizing its winner alone.

    python -m bench.search.comparison [--only digits,minilm] [--space backend=eager,ort] [--time 1h] [--again]
                                      [--olive .olive/bin/python]

For each model three runs, each a process of its own whose caches hold the native kernels alone: the search;
everything (`bench.search.everything`: the same stages without a bound); the search's winner alone, by the command of
its report. Printed are trials run, CPU and wall time of the search over those of its winner alone, and the latency of
the search's winner over that of the winner of everything: both artifacts in turns (`bench.search.winners`), in
`PROCESSES` processes one after the other. The trials' own times would not do: they were taken minutes apart. What was
run is kept in .work/search/rows.json, printed with what is asked for, and not run again without --again. Bars, of
models that have all three: at most 3 × the winner's CPU time, latency within 3 %. Exit code 1 when one is missed.
With `--olive` Olive searches the same model as an ONNX graph: its wall and CPU time, and the latency and the error of
what it chose beside ours. Olive's environment has olive-ai 0.13, pydantic 2.11 (with 2.14 it fails at start), optuna,
pandas, questionary and torchmetrics, and ours behind it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from bench.kernels.auto_backend_models import MODELS, SOURCES
from bench.search import rivals
from bench.search.sources import RESNET18, arguments
from bench.serve.reporting import exit_code, progress, write_results
from bench.shared.repository import ROOT, child_environment, module_command
from infer import paths
from infer.kernels import cpu
from infer.report import inspection
from infer.report.search_record import SearchRecord

WORK = ROOT / ".work" / "search"
ROWS = WORK / "rows.json"
CPU_BAR, LATENCY_BAR = 3.0, 1.03
PROCESSES = (
    5  # in which the two winners are compared: where memory lies differs more between processes than in one
)
LOOK = 0.25  # seconds between two looks at the CPU times of a run's processes
KINDS = ("weights alone", "roofline", "gains at most", "slower than", "not faithful", "would need", "left")


def main() -> int:
    """Run what is missing, print the table, and return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["digits", "minilm", RESNET18, "pydoc_lm"]
    parser.add_argument("--only", type=lambda text: text.split(","), default=names)
    parser.add_argument("--space", action="append", default=[], help="passed on, NAME=VALUES")
    parser.add_argument("--time", default="", help="of each search, as --time of infer optimize")
    parser.add_argument(
        "--olive", default="", help="Python of an environment with olive-ai: search with it too"
    )
    parser.add_argument("--again", action="store_true", help="run again what was kept")
    asked = parser.parse_args()
    if unknown := set(asked.only) - {*SOURCES, *MODELS, RESNET18}:
        parser.error(f"no model named {', '.join(sorted(unknown))}")
    WORK.mkdir(parents=True, exist_ok=True)
    cpu.why_not()  # compiles the kernels, which belong to no run
    rows: dict[str, Any] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for name in asked.only:
        if asked.again:
            rows.pop(name, None)
        row = rows.setdefault(name, {})
        fill(name, row, asked, lambda: ROWS.write_text(json.dumps(rows, indent=1) + "\n"))
    lines, _ = table(rows)
    _, missed = table({name: rows[name] for name in asked.only})
    write_results("search", {"rows": rows}, "\n".join(lines))
    return exit_code(missed)


def fill(name: str, row: dict[str, Any], asked: argparse.Namespace, save: Any) -> None:
    """Run the parts of a row that it lacks; `save` is called after each."""
    words = [*arguments(name, WORK), "--for", "latency", "--fresh", "--force"]
    words += [f"--space={text}" for text in asked.space] + ([f"--time={asked.time}"] if asked.time else [])
    for part, module in (("search", "infer"), ("everything", "bench.search.everything")):
        if part not in row:
            output = WORK / f"{name}-{part}.infer"
            command = module_command(module, "optimize", *words, "-o", str(output))
            row[part] = measured(f"{name}: {part}", command, INFER_CACHE=empty_cache(f"{name}-{part}"))
            row[part] |= summary(output) if row[part]["code"] == 0 else {}
            save()
    if "alone" not in row and "command" in row["search"]:
        command = [*row["search"]["command"][1:], "--output", str(WORK / f"{name}-alone.infer"), "--force"]
        own = empty_cache(f"{name}-alone")
        row["alone"] = measured(
            f"{name}: its winner alone", module_command("infer", *command), INFER_CACHE=own
        )
        save()
    if "turns" not in row and all("command" in row[part] for part in ("search", "everything")):
        row["turns"] = in_turns(*(WORK / f"{name}-{part}.infer" for part in ("search", "everything")))
        save()
    if asked.olive and "olive" not in row and "command" in row["search"]:
        chosen = WORK / f"{name}-search.infer"
        row["olive"] = rivals.olive(name, arguments(name, WORK), chosen, asked.olive, WORK, measured)
        save()


def in_turns(chosen: Path, best: Path) -> dict[str, Any]:
    """Return the time of one artifact over that of another: the median over processes, its least and largest value."""
    found = []
    for _ in range(PROCESSES):
        command = module_command("bench.search.winners", str(chosen), str(best))
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, env=child_environment())
        ours, theirs = json.loads(done.stdout.splitlines()[-1])
        found.append(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)))
    return {"ratio": statistics.median(found), "low": min(found), "high": max(found)}


def empty_cache(name: str) -> str:
    """Make a cache folder that holds the native kernels alone: times of layers and compiled code are found anew."""
    folder = WORK / "caches" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "kernels").symlink_to(paths.cache("kernels"))
    return str(folder)


def measured(label: str, command: list[str], **environment: str) -> dict[str, Any]:
    """Run a command; return exit code, wall and CPU seconds of all its processes, and the end of what it said."""
    progress(label)
    log = WORK / "last.log"
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=child_environment(**environment)
        )
        over, spent = threading.Event(), {}
        watcher = threading.Thread(target=watch, args=(process.pid, over, spent))
        watcher.start()
        code = process.wait()
        over.set()
        watcher.join()
    seconds = {"wall": round(time.monotonic() - began, 1), "cpu": round(sum(spent.values()), 1)}
    return {"code": code, **seconds, "said": log.read_text()[-1500:]}


def watch(pid: int, over: threading.Event, spent: dict[tuple[int, float], float]) -> None:
    """Keep the CPU seconds of every process below `pid`, those that end in between and are killed included."""
    while not over.wait(LOOK):
        try:
            parent = psutil.Process(pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.Error:
            return
        for one in family:
            try:
                times = one.cpu_times()
                spent[one.pid, one.create_time()] = times.user + times.system
            except psutil.Error:
                continue


def summary(artifact: Path) -> dict[str, Any]:
    """Return winner, its command, outcomes, and seconds of every trial as a ratio to the first float form known."""
    record = inspection.report(artifact).search
    if record is None:
        raise SystemExit(f"{artifact} has no record of a search")
    best = next(trial for trial in record.trials if trial.chosen)
    skipped = Counter(
        next((kind for kind in KINDS if kind in trial.reason), trial.reason)
        for trial in record.trials
        if trial.outcome == "skipped" and trial.measured is None
    )
    ran = [trial for trial in record.trials if trial.outcome != "skipped" or trial.measured is not None]
    return {
        "winner": best.candidate.label,
        "command": best.command.split(),
        "trials": len(ran),
        "skipped": dict(skipped),
        "outcomes": dict(Counter(trial.outcome for trial in record.trials)),
        "ratios": ratios(record),
    }


def ratios(record: SearchRecord) -> dict[str, float]:
    """Return the latency of each timed trial over that of torch eager, by label; comparable within one run."""
    first: dict[str, float] = {}
    found = {}
    for trial in record.trials:
        if trial.measured is None or not trial.measured.seconds:
            continue
        batch = min(trial.measured.seconds)
        for form, seconds in trial.measured.rival_seconds.items():
            first.setdefault(form, seconds.get(batch, 0.0))
        rival = trial.measured.rivals.get(batch, "")
        if first.get(rival):
            found[trial.candidate.label] = trial.measured.ratios[batch] * first[rival]
    unit = first.get("torch eager") or next(iter(first.values()), 1.0)
    return {label: seconds / unit for label, seconds in found.items()}


def table(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and the bars that were missed."""
    heads = (
        "model",
        "winner",
        "of everything",
        "trials",
        "of",
        "CPU of the search / winner",
        "wall of the search / winner",
        "latency / best",
        "latency / Olive's",
        "wall / Olive's",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    missed = []
    for name, row in rows.items():
        search, everything, alone = (row.get(part, {}) for part in ("search", "everything", "alone"))
        cpu = search["cpu"] / alone["cpu"] if alone.get("cpu") and search.get("cpu") else None
        slower = row.get("turns", {}).get("ratio")
        cells = [name, search.get("winner", f"exit {search.get('code')}"), everything.get("winner", "-")]
        cells += [str(search.get("trials", "-")), str(everything.get("trials", "-"))]
        wall = "-" if cpu is None else f"{search['wall'] / alone['wall']:.1f}"
        cells += ["-" if cpu is None else f"{cpu:.1f}", wall, _times_best(row)]
        cells += _beside_olive(row)
        lines.append(f"| {' | '.join(cells)} |")
        missed += [f"{name}: CPU time {cpu:.1f} x its winner's"] if cpu and cpu > CPU_BAR else []
        missed += [f"{name}: latency {slower:.3f} x the best"] if slower and slower > LATENCY_BAR else []
    return lines, missed


def _beside_olive(row: dict[str, Any]) -> list[str]:
    """Write the latency of our search's choice over that of Olive's, and the wall times of both searches."""
    olive, ours = row.get("olive", {}), row.get("search", {})
    ratio = olive.get("our_time_over_theirs")
    wall = ours["wall"] / olive["wall"] if ours.get("wall") and olive.get("wall") else None
    return ["-" if ratio is None else f"{ratio:.3f}", "-" if wall is None else f"{wall:.2f}"]


def _times_best(row: dict[str, Any]) -> str:
    """Write the latency of the search's winner over that of the winner of everything, with its range over processes."""
    if (turns := row.get("turns")) is None:
        return "-"
    return f"{turns['ratio']:.3f} ({turns['low']:.3f} to {turns['high']:.3f})"


if __name__ == "__main__":
    sys.exit(main())
