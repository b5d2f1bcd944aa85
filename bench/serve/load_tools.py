"""Third-party load tools against `infer serve`: their versions, and whether they end without an error.

    python -m bench.serve.load_tools [PYDOC_LM.infer MINILM.infer] [--tools .tools] [--only NAME,…]

Serves a language model (pydoc_lm) and an encoder (MiniLM) on one port and sets perf_analyzer and aiperf on it (`make
.tools/.installed`). Nothing is timed for its own sake; a tool that ends with an error makes the exit code 1, one that
is not installed is named. Clients (openai, tritonclient, llm-comply) are tests: `tests/serve/api`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.serve.serving import serving
from bench.shared.command_line import parser_of
from bench.shared.example_models import artifact
from bench.shared.repository import ROOT
from bench.shared.results import write_results

SECONDS = 2  # of a measurement of perf_analyzer
LINES = 14  # of what a tool printed that are kept
SHOWN = ("Concurrency: ", "Throughput", "Latency", "latency", "p99", "Request Count", "Time to First", "rror")


def commands(
    tools: Path, address: str, text: str, embedding: str, artifact: str, work: Path
) -> dict[str, Any]:
    """Return the command of each tool; `text`, `embedding`: names of the models, `artifact` of the first."""
    rows, chats = work / "rows.json", work / "chats.json"
    ids = {"content": [101, *range(2000, 2014), 102], "shape": [16]}
    row = {"input_ids": ids, "attention_mask": {"content": [1] * 16, "shape": [16]}}
    rows.write_text(json.dumps({"data": [row]}))
    chat = {"model": text, "messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 8}
    chats.write_text(json.dumps({"data": [{"payload": [chat]}]}))
    perf = [str(tools / "perf" / "perf_analyzer"), "-u", address, "-s", "60"]
    perf.append(f"--measurement-interval={SECONDS * 1000}")
    tensors = f"-m {embedding} -i http -b 4 --concurrency-range 1:4:3 --input-data {rows}"
    openai = f"-m {text} --service-kind openai --endpoint v1/chat/completions --async --concurrency-range 2:2"
    profile = (
        f"profile --model {text} --url http://{address} --endpoint-type chat --streaming --concurrency 2"
    )
    profile += f" --tokenizer {artifact} --request-count 12 --synthetic-input-tokens-mean 40"
    return {
        "perf_analyzer, tensors": [*perf, *tensors.split()],
        "perf_analyzer, openai": [*perf, *openai.split(), "--input-data", str(chats)],
        "aiperf": [
            str(tools / "bin" / "aiperf"),
            *profile.split(),
            "--output-tokens-mean",
            "12",
            "--ui",
            "none",
        ],
    }


def run(name: str, command: list[str], tools: Path, work: Path) -> dict[str, Any]:
    """Run one tool: its status, and the lines of its output that matter."""
    if not Path(command[0]).exists():
        return {
            "tool": name,
            "status": "not run",
            "said": [f"{command[0]} is not there: make .tools/.installed"],
        }
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "160", "LD_LIBRARY_PATH": str(tools / "perf")}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=work, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    failed = done.returncode or (name.startswith("perf") and "throughput: " not in done.stdout)
    status = f"exit {done.returncode}: {(lines or ['no reason'])[-1][:200]}" if failed else "ran"
    return {"tool": name, "status": status, "said": [x for x in lines if any(w in x for w in SHOWN)][:LINES]}


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| tool | |", "|---|---|", *(f"| {row['tool']} | {row['status']} |" for row in rows)]
    for row in rows:
        lines += ["", f"### {row['tool']}", "", "```", *row["said"], "```"]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("artifacts", nargs="*")
    parser.add_argument("--tools", type=Path, default=ROOT / ".tools")
    parser.add_argument("--only", default="", help="names of tools, separated by commas")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = [str(Path(one).resolve()) for one in asked.artifacts]
        made = made or [artifact(name, folder, quant="int8") for name in ("pydoc_lm", "minilm")]
        names = [json.loads((Path(one) / "manifest.json").read_text())["name"] for one in made]
        with serving([sys.executable, "serve.py", *made, "--port", "0"]) as (port, _):
            known = commands(asked.tools, f"127.0.0.1:{port}", *names, made[0], Path(folder))
            wanted = asked.only.split(",") if asked.only else list(known)
            rows = [run(name, known[name], asked.tools, Path(folder)) for name in wanted]
    write_results("serve-tools", {"tools": rows}, markdown(rows))
    return 1 if any(row["status"] not in ("ran", "not run") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
