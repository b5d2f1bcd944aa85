"""First measurements on a new GPU: facts, tests, kernels, the product, profiles.

    python -m bench.gpu.first_contact [--only facts,tests] [--again] [--out FOLDER]

Parts of at most ten minutes, most valuable first; each runs in a process of its own under a time limit, writes
PART.json and PART.md into the folder at once, and never stops the next. A part that is done is not run again, so that
an interrupted run goes on where it was; `--again` runs it once more. Without a GPU every command fails with that reason
and its part stays open. Works from a plain checkout with PyTorch, Triton and transformers, once msgspec is there; a
part that needs psutil, rich, typer or pytest fails with the name of the one that is missing.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.shared.command_line import parser_of
from bench.shared.repository import RESULTS, ROOT, child_environment, module_command

TAIL = 4000  # characters of a command's output that are kept
INFER = [sys.executable, "-m", "infer"]
GPU_TESTS = {  # with their limits in seconds
    "tests/kernels/test_triton_kernels.py": 100,
    "tests/kernels/test_fragment_gemm.py": 70,
    "tests/kernels/test_triton_groupwise.py": 70,
    "tests/kernels/test_triton_experts.py": 60,
    "tests/kernels/test_triton_state.py": 60,
    "tests/attention/test_triton_attention.py": 80,
    "tests/attention/test_triton_rotary.py": 40,
    "tests/backends": 120,
}
ATTENTION_TESTS = "tests/attention/test_triton_attention.py"


@dataclass(frozen=True)
class Command:
    """One process of a part: its name in the results, its words, its limit in seconds."""

    name: str
    words: list[str]
    limit: int


@dataclass(frozen=True)
class Part:
    """Commands that run in order; a failed one does not stop the next."""

    name: str
    question: str
    commands: Callable[[Path], list[Command]]


def facts(folder: Path) -> list[Command]:
    return [Command("facts", module_command("bench.gpu.facts", str(folder / "facts-found.json")), 480)]


def tests(folder: Path) -> list[Command]:
    words = ["-q", "-x", "--maxfail=20", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    return [
        Command(Path(path).stem, module_command("pytest", path, *words), limit)
        for path, limit in GPU_TESTS.items()
    ]


def kernels(folder: Path) -> list[Command]:
    return [Command("quantized linear", module_command("bench.gpu.quantized_linear", "--minutes", "7"), 540)]


def attention(folder: Path) -> list[Command]:
    words = ["--batches", "1,8", "--contexts", "2048"]
    return [
        Command("attention", module_command("bench.gpu.decode_step", "--no-step"), 240),
        Command("steps", module_command("bench.gpu.decode_step", *words), 320),
    ]


def product(folder: Path) -> list[Command]:
    """Return the commands of the product: a random 1B checkpoint, optimized in three formats and measured."""
    source = folder / "llama-1b"
    make = (
        "import sys, torch; from pathlib import Path; from bench.shared.llama_checkpoint import *; "
        "p = Path(sys.argv[1]); p.exists() or make_checkpoint(p, LLAMA_1B, dtype=torch.bfloat16)"
    )
    found = [Command("checkpoint", [sys.executable, "-c", make, str(source)], 90)]
    for quant in ("none", "nf4", "int8"):
        made = folder / f"llama-1b-{quant}.infer"
        optimize = [str(source), "--quant", quant, "--backend", "inductor", "--device", "cuda"]
        words = ["--data", "random", "--allow-slower", "--output", str(made)]
        found.append(Command(f"optimize {quant}", [*INFER, "optimize", *optimize, *words], 120))
        result = ["--output", str(folder / f"bench-{quant}.json")]
        found.append(
            Command(f"bench {quant}", [*INFER, "bench", str(made), "--batch", "1,8,64", *result], 40)
        )
    return found


def profile(folder: Path) -> list[Command]:
    """Return the profilers over one kernel run and over the attention tests, where they are installed."""
    run = module_command("bench.gpu.quantized_linear", "--minutes", "0.2", "--only", "lut4*")
    ncu = ["ncu", "--clock-control", "none", "--set", "basic", "--launch-count", "30", *run]
    checked = module_command("pytest", "-q", "-x", ATTENTION_TESTS, "-p", "no:cacheprovider")
    return [Command("ncu", ncu, 180), Command("sanitizer", ["compute-sanitizer", *checked], 180)]


PARTS = (
    Part("facts", "Facts: devices, CUDA graphs, row limits, fp8, costs", facts),
    Part("tests", "Tests on this GPU", tests),
    Part("kernels", "Share of the bandwidth of the quantized layers, and the crossovers", kernels),
    Part("attention", "Share of the bandwidth of attention and whole steps", attention),
    Part("product", "A 1B model from checkpoint to tokens per second", product),
    Part("profile", "Profiles: instructions, memory, races", profile),
)


def no_device() -> str | None:
    """Return `no CUDA device`, or None; a subprocess asks, so that this process holds no GPU memory."""
    ask = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'no CUDA device')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return _last_line(done.stderr) if done.returncode else None


def run_command(command: Command) -> dict[str, Any]:
    """Run one process; return its outcome, the reason where it failed, seconds and the end of its output."""
    began = time.perf_counter()
    if shutil.which(command.words[0]) is None:
        return {
            "command": command.name,
            "outcome": "failed",
            "reason": f"{command.words[0]} is not installed",
        }
    try:
        done = subprocess.run(
            command.words,
            cwd=ROOT,
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=command.limit,
            check=False,
        )
        said, code = done.stdout, done.returncode
        reason = "" if code == 0 else f"exit code {code}: {_last_line(said)}"
    except subprocess.TimeoutExpired as error:
        kept = error.stdout or b""
        said = kept.decode(errors="replace") if isinstance(kept, bytes) else kept
        code, reason = None, f"stopped after {command.limit} seconds"
    return {
        "command": command.name,
        "words": command.words,
        "outcome": "passed" if code == 0 else "failed",
        "reason": reason,
        "seconds": round(time.perf_counter() - began, 1),
        "output": said[-TAIL:],
    }


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def run_part(part: Part, folder: Path) -> dict[str, Any]:
    """Run a part and write its two files after each command."""
    found: dict[str, Any] = {"part": part.name, "question": part.question, "done": False, "commands": []}
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commands = part.commands(folder)
    if reason := no_device():
        found["commands"] = [{"command": c.name, "outcome": "failed", "reason": reason} for c in commands]
        write(found, folder)
        print(f"{part.name}: {reason}", flush=True)
        return found
    for number, command in enumerate(commands, 1):
        print(f"{part.name}: {command.name}", flush=True)
        found["commands"].append(run_command(command))
        found["done"] = number == len(commands)
        write(found, folder)
        print(f"  {found['commands'][-1]['outcome']} {found['commands'][-1]['reason']}", flush=True)
    return found


def write(found: dict[str, Any], folder: Path) -> None:
    """Write PART.json and PART.md, each whole or not at all."""
    rows = "".join(
        f"| {c['command']} | {c['outcome']} | {c.get('seconds', '')} | {c['reason'].replace('|', '/')} |\n"
        for c in found["commands"]
    )
    head = "| command | outcome | seconds | reason |\n|---|---|--:|---|\n"
    page = f"# {found['question']}, {found['date']}\n\n{head}{rows}"
    extra = "".join(
        f"\n## {c['command']}\n\n```\n{c['output'].strip()}\n```\n"
        for c in found["commands"]
        if c.get("output")
    )
    for suffix, text in ((".json", json.dumps(found, indent=1)), (".md", page + extra)):
        fresh = folder / f".{found['part']}{suffix}"
        fresh.write_text(text)
        os.replace(fresh, folder / f"{found['part']}{suffix}")


def is_done(part: Part, folder: Path) -> bool:
    """Tell if a part ran to its end in an earlier run; a damaged file counts as not."""
    try:
        return bool(json.loads((folder / f"{part.name}.json").read_text())["done"])
    except (OSError, ValueError, KeyError):
        return False


def main() -> int:
    """Run the open parts; return 1 when a command of one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(part.name for part in PARTS))
    parser.add_argument("--again", action="store_true", help="run parts that are done once more")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gpu-first-{datetime.date.today()}")
    given = parser.parse_args()
    folder: Path = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in PARTS:
        if part.name not in given.only.split(","):
            continue
        if is_done(part, folder) and not given.again:
            print(f"{part.name}: done before")
            continue
        failed += sum(c["outcome"] == "failed" for c in run_part(part, folder)["commands"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
