"""docs/results.md from bench/results: the newest files of each benchmark and machine, and every bar that was missed.

    python -m bench.shared.results_page

Rows are copied from the result files, never typed. Run again after a benchmark; a test compares page and files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.shared.repository import RESULTS, ROOT

PAGE = ROOT / "docs" / "results.md"
NAMES = {"amd-epyc": "AMD EPYC", "intel-xeon-2-50ghz": "Intel Xeon @ 2.50GHz"}
FILE = re.compile(r"(?P<name>[a-z-]+)-(?P<date>\d{4}-\d\d-\d\d)(?:-(?P<cpu>.+))?\.md")
SECTIONS = {
    "kernels": (
        "Kernels and whole int8 models",
        "`make bench-kernels`. Sides are timed in turns, two threads. M is the number of rows; *lut4* is the kernel "
        "of the 4-bit formats. BERT-base has the weights of MiniLM with every channel and layer doubled. All layers "
        "of the whole models are int8; `infer optimize` would keep the most sensitive ones in float.",
    ),
    "auto": (
        "Automatic choice of a backend",
        "`make bench-auto`. `infer optimize --backend auto` on models that nobody tuned for.",
    ),
    "real": (
        "Published files",
        "`make real`. Model files as they lie in wheels of the package index, given to `infer optimize` with nothing "
        "else and with `--quant int8`. Times are ours ÷ the file in its own runtime, at batch 1 and 8 of real inputs, "
        "two threads; the task is measured on real inputs for both. *Untrue* counts the numbers of a verdict that "
        "another measurement does not give.",
    ),
    "lm": (
        "Language models",
        "`make bench-lm`. Random weights of two Llama shapes at 4 bits (135M and 1B parameters), two threads. A work "
        "like *8×128* is 8 sequences at context 128.",
    ),
    "same-gguf-file": (
        "The same GGUF file in llama.cpp",
        "`python -m bench.llm.suite --only 'same*'`. Two Llama shapes with random weights; both engines compute with "
        "the codes of one file.",
    ),
    "serve-peers": (
        "Serving: other servers",
        "`make bench-serve`. Each server at its best settings, one worker, in turns on one machine that also runs the "
        "client. *-same* serves the artifact of `infer`, *-float* the model in torch float32.",
    ),
    "serve-fast-path": (
        "Serving: with and without the fast path",
        "`python -m bench.serve.fast_path_gain`.",
    ),
    "serve-encoders": (
        "Serving: encoders with texts of mixed lengths",
        "`python -m bench.serve.encoder_goodput`.",
    ),
    "serve-hop": ("Serving: cost of a worker process", "`make bench-serve`."),
    "serve-overload": ("Serving: overload with tensors", "`make bench-serve`."),
    "serve-overload-lm": ("Serving: overload with text streams", "`make bench-serve`."),
    "serve-slow": ("Serving: slow clients", "`make endure`."),
    "load": ("Opening large checkpoints", "`make bench-load`."),
    "recovery": (
        "Recovery of quantized models",
        "`make bench-tune`. Error against the float original on rows that neither train nor calibrate, after and "
        "before `--recover`.",
    ),
    "quality-per-bit": (
        "Quality per bit",
        "`make bench-bits`. Loss against the float original on held-out rows, calibrated on the same rows, without "
        "recovery. *All weights* counts the embedding, *blocks* the matrices of the blocks beside a float "
        "embedding.\n\n![Loss against bits per weight of each contender](quality-per-bit.svg)",
    ),
    "tune-memory": (
        "Memory of training",
        "`make bench-tune-memory`. One step of LoRA over a Llama shape with random weights. Peaks are those of a "
        "process with interpreter and opening; times are CPU seconds of all threads, on a machine that did other "
        "work too.",
    ),
    "table": (
        "Every backend with every format",
        "`make table`, with the models of `models/`. Time is relative to the float form of the same backend in the "
        "same interleaved run: below 1 is faster; of pydoc_lm it is the time of a decode step. (`infer optimize` "
        "compares with the fastest float form of all, plain torch among them.) A refusal is a result: the gate or the "
        "machine gives the reason.",
    ),
}
INTRO = """# Results

Measured figures, copied from `bench/results` by `python -m bench.shared.results_page`; each block names its processor
and date. Bars are the goals that a benchmark checks: a factor against the named rival in the same run. Machines are
shared virtual machines with two cores; *AMD EPYC* is a Zen 5 on 2026-11-22 and 2026-11-24, a Zen 4 on 2026-11-23,
2026-11-25 and 2026-11-26, *Intel Xeon @ 2.50GHz* a Cascade Lake. All have AVX-512 VNNI, none has AMX.
"""


@dataclass(frozen=True)
class ResultFile:
    """One Markdown file of bench/results."""

    name: str
    date: str
    cpu: str
    path: Path

    @property
    def machine(self) -> str:
        """Processor and date, as a heading; newer files name family and model too, which brands hide."""
        brand, numbers = re.fullmatch(r"(.+?)((?:-[0-9a-f]+h)*)", self.cpu).groups()  # type: ignore[union-attr]
        model = f" ({numbers[1:].replace('-', ' ')})" if numbers else ""
        return f"{NAMES.get(brand, brand)}{model}, {self.date}"

    @property
    def bars(self) -> dict[tuple[str, str], str]:
        """Lines of the table of bars, by work and rival."""
        lines = [line for line in self.body.splitlines() if line.endswith(("met |", "**missed** |"))]
        return {
            (cells[0].strip(), cells[1].strip()): line for line in lines for cells in [line[1:].split("|")]
        }

    @property
    def cells(self) -> set[tuple[str, ...]]:
        """Model, format and backend of each row of a table."""
        rows = (line.strip("| ").split("|") for line in self.body.splitlines() if line.startswith("| "))
        return {tuple(cell.strip() for cell in row[:3]) for row in rows}

    @property
    def body(self) -> str:
        """Text without headings of the first level."""
        lines = self.path.read_text().strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("# ")).strip()


def newest() -> list[ResultFile]:
    """Return the newest files of each benchmark and machine; of the table the one with the most rows, and those that
    have a backend, format or model that it lacks.

    An older file of which more than half of the bars were not measured since is shown too: the newer is of a part.
    """
    kept: dict[tuple[str, str], list[ResultFile]] = {}
    for path in sorted(RESULTS.glob("*.md"), reverse=True):
        found = FILE.fullmatch(path.name)
        if found is None or found["name"] not in SECTIONS:
            continue
        result = ResultFile(found["name"], found["date"], found["cpu"] or "intel-xeon-2-50ghz", path)
        newer = kept.setdefault((result.name, result.cpu), [])
        since = {bar for one in newer for bar in one.bars}
        if not newer or 2 * len(result.bars.keys() - since) > len(result.bars):
            newer.append(result)
    results = [result for group in kept.values() for result in group]
    tables = [result for result in results if result.name == "table"]
    fullest = max(tables, key=lambda result: result.body.count("\n"), default=None)
    return [
        result
        for result in results
        if result.name != "table" or fullest is None or result is fullest or result.cells - fullest.cells
    ]


def missed(results: list[ResultFile]) -> Iterator[str]:
    """Yield one table row for each bar that a machine missed when it was last measured there."""
    seen: set[tuple[str, tuple[str, str]]] = set()
    for result in sorted(results, key=lambda result: result.date, reverse=True):
        for bar, line in result.bars.items():
            key = (result.cpu, bar)
            if key in seen:
                continue
            seen.add(key)
            if line.endswith("**missed** |"):
                work, rival, _, _, need, got = (cell.strip() for cell in line.strip("| ").split("|")[:6])
                yield f"| {work} | {rival} | {need} | {got} | {result.machine} |"


def page() -> str:
    """Return the text of docs/results.md."""
    results = newest()
    parts = [
        INTRO,
        "## Bars that are missed\n",
        "| work | rival | bar | got | machine, date |\n|---|---|---|---|---|\n"
        + "\n".join(missed(results))
        + "\n",
    ]
    for name, (title, note) in SECTIONS.items():
        own = [result for result in results if result.name == name]
        if not own:
            continue
        parts.append(f"## {title}\n\n{note}\n")
        for result in sorted(own, key=lambda result: result.cpu):
            parts.append(f"### {result.machine}\n\n`bench/results/{result.path.name}`\n\n{result.body}\n")
    return "\n".join(parts)


def write() -> None:
    """Write docs/results.md."""
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
    print(f"written: {PAGE.relative_to(ROOT)}")
    sys.exit(0)
