"""Third-party clients and load tools against `infer serve`: their versions and what they print.

    python -m bench.serve.client_tools [TEXT.infer EMBEDDING.infer] [--tools .tools] [--comply .conformance]
                                       [--only NAME,…]

Serves a language model (pydoc_lm) and an encoder (MiniLM) on one port and sets every tool that is installed on it:
openai (of the development extra), tritonclient, perf_analyzer, aiperf (`make .tools/.installed`), llm-comply (`make
conformance`). Nothing is timed for its own sake; a tool that ends with an error, or finds fault, makes the exit code 1.
One that is not installed is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.serve.client_tools_commands import (
    AIPERF,
    COMPLY,
    OPENAI,
    PERF_ANALYZER,
    PERF_OPENAI,
    TRITON,
    Environment,
    Tool,
)
from bench.serve.reporting import progress, write_results
from bench.serve.server_processes import make_minilm
from bench.shared.repository import ROOT

LINES = 14  # of what a tool printed that are kept


def run(tool: Tool, place: Environment) -> dict[str, Any]:
    """Run one tool: its version, exit status, and the lines of its output that matter."""
    reason = tool.missing(place)
    if reason:
        return {"tool": tool.name, "version": "", "status": "not run", "said": [reason]}
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "160", **tool.env(place)}
    env.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            tool.command(place),
            cwd=place.work,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"tool": tool.name, "version": tool.version(place), "status": "took over 300 s", "said": []}
    text = done.stdout + done.stderr
    fault = tool.fault(done)
    kept = [line.rstrip() for line in tool.digest(text) if line.strip()][:LINES]
    status = f"exit {done.returncode}: {fault[:200]}" if fault else "ran"
    return {"tool": tool.name, "version": tool.version(place), "status": status, "said": kept}


def serving(stack: ExitStack, artifacts: list[str]) -> str:
    """Return the address of a server of all models."""
    command = [sys.executable, "serve.py", *artifacts, "--port", "0"]
    running = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    stack.callback(running.terminate)
    assert running.stdout is not None
    line = running.stdout.readline()
    if "127.0.0.1:" not in line:
        raise SystemExit("the server did not start")
    return f"127.0.0.1:{line.partition('127.0.0.1:')[2].split()[0].rstrip('/')}"


def artifacts(folder: str, progress: Callable[[str], None]) -> list[str]:
    from infer import Plan, optimize

    progress("making the pydoc_lm artifact")
    source = ROOT / "models" / "pydoc_lm"
    plan = Plan(source=str(source), data=str(source / "samples.txt"), quant="int8", allow_slower=True)
    return [
        str(optimize(plan, Path(folder) / "pydoc_lm.infer").path),
        make_minilm(folder, progress, quant="int8"),
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| tool | version | |", "|---|---|---|"]
    lines += [f"| {row['tool']} | {row['version']} | {row['status']} |" for row in rows]
    for row in rows:
        lines += ["", f"### {row['tool']}", "", "```", *row["said"], "```"]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", nargs="*")
    parser.add_argument("--tools", default=str(ROOT / ".tools"))
    parser.add_argument("--comply", default=str(ROOT / ".conformance"))
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    tools = (OPENAI, TRITON, PERF_ANALYZER, PERF_OPENAI, COMPLY, AIPERF)
    wanted = [tool for tool in tools if not asked.only or tool.name in asked.only.split(",")]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = [str(Path(one).resolve()) for one in asked.artifacts] or artifacts(folder, progress)
        names = [json.loads((Path(one) / "manifest.json").read_text())["name"] for one in made]
        address = serving(stack, made)
        rows = []
        for tool in wanted:
            progress(tool.name)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            place = Environment(
                address, names[0], names[1], Path(made[0]), Path(asked.tools), Path(asked.comply), work
            )
            rows.append(run(tool, place))
    write_results("serve-tools", {"tools": rows}, markdown(rows))
    return 1 if any(row["status"] not in ("ran", "not run") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
