"""Third-party tools of `client_tools.py`: the command of each, and the lines of its output that hold the result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PERF_SECONDS = 2
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Environment:
    """Places that the tools run in.

    `address`: host:port; `text`, `embedding`: names of the models; `artifact`: of the first; `tools`, `comply`:
    environments; `work`: an empty folder.
    """

    address: str
    text: str
    embedding: str
    artifact: Path
    tools: Path
    comply: Path
    work: Path


def _error(done: Done) -> str:
    """Return the last line that the tool printed, if it failed."""
    return (done.stderr.strip() or "no reason").splitlines()[-1] if done.returncode else ""


@dataclass(frozen=True)
class Tool:
    """One tool. `needs`: what must exist, with the command that makes it; `fault`: what was wrong, or nothing."""

    name: str
    needs: Callable[[Environment], tuple[Path, str]]
    command: Callable[[Environment], list[str]]
    version: Callable[[Environment], str]
    digest: Callable[[str], list[str]] = str.splitlines
    fault: Callable[[Done], str] = _error
    env: Callable[[Environment], Mapping[str, str]] = lambda place: {}

    def missing(self, place: Environment) -> str:
        path, how = self.needs(place)
        return "" if path.exists() else f"{path} is not there: {how}"


def _packaged(python: Callable[[Environment], Path], package: str) -> Callable[[Environment], str]:
    asked = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"

    def version(place: Environment) -> str:
        command = [str(python(place)), "-c", asked, package]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()

    return version


def _here(place: Environment) -> Path:
    return Path(sys.executable)


def _tools(place: Environment) -> Path:
    return place.tools / "bin" / "python"


def _with(*words: str) -> Callable[[str], list[str]]:
    """Return the lines that hold one of these words."""
    return lambda text: [line for line in text.splitlines() if any(word in line for word in words)]


MAKE = "make .tools/.installed"
OPENAI_SCRIPT = """
import sys, openai
client = openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="none", max_retries=0)
text, embedding = sys.argv[2:4]
print("models.list:", [one.id for one in client.models.list()])
messages = [{"role": "user", "content": "What does len do?"}]
whole = client.chat.completions.create(model=text, messages=messages, max_tokens=12, temperature=0, logprobs=True)
print("chat:", repr(whole.choices[0].message.content), whole.choices[0].finish_reason, whole.usage.completion_tokens)
stream = client.chat.completions.create(
    model=text, messages=messages, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
made = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
assert made == whole.choices[0].message.content, (made, whole)
print("stream:", len(chunks), "events, the same text, usage", chunks[-1].usage.completion_tokens)
done = client.completions.create(model=text, prompt=["def f(", "import "], max_tokens=6, logprobs=1, temperature=0)
print("completions:", [one.text for one in done.choices])
vectors = client.embeddings.create(model=embedding, input=["one text", "another text"]).data
print("embeddings:", len(vectors), "of", len(vectors[0].embedding), "values, from base64")
try:
    client.chat.completions.create(model="nope", messages=messages)
except openai.NotFoundError as error:
    print("NotFoundError:", error.code)
"""
TRITON_SCRIPT = """
import sys
import numpy as np
import tritonclient.http as triton
client = triton.InferenceServerClient(sys.argv[1])
model = sys.argv[2]
print("live", client.is_server_live(), "ready", client.is_server_ready(), "model", client.is_model_ready(model))
print("extensions:", client.get_server_metadata()["extensions"])
print("metadata:", [(one["name"], one["datatype"], one["shape"]) for one in client.get_model_metadata(model)["inputs"]])
print("config: max_batch_size", client.get_model_config(model)["max_batch_size"])
def ask(binary):
    text = triton.InferInput("text", [2], "BYTES")
    text.set_data_from_numpy(np.array(["one text", "another text"], dtype=object), binary_data=binary)
    wanted = [triton.InferRequestedOutput("embedding", binary_data=binary)]
    return client.infer(model, [text], outputs=wanted, request_id="me").as_numpy("embedding")
raw, plain = ask(True), ask(False)
assert raw.shape == plain.shape and np.allclose(raw, plain, atol=1e-6), (raw, plain)
print("infer: BYTES in,", raw.shape, raw.dtype, "out; raw and JSON agree")
ids = np.array([[101, 2028, 3793, 102]], dtype=np.int64)
given = [triton.InferInput(n, [1, 4], "INT64") for n in ("input_ids", "attention_mask")]
given[0].set_data_from_numpy(ids)
given[1].set_data_from_numpy(np.ones_like(ids))
print("infer: INT64 in,", client.infer(model, given).as_numpy("embedding").shape, "out")
stats = client.get_inference_statistics(model)["model_stats"][0]
print("statistics: success", stats["inference_stats"]["success"]["count"], "executions", stats["execution_count"])
client.close()
"""

OPENAI = Tool(
    "openai",
    lambda place: (_here(place), ""),
    lambda place: [sys.executable, "-c", OPENAI_SCRIPT, place.address, place.text, place.embedding],
    _packaged(_here, "openai"),
)
TRITON = Tool(
    "tritonclient",
    lambda place: (_tools(place), MAKE),
    lambda place: [str(_tools(place)), "-c", TRITON_SCRIPT, place.address, place.embedding],
    _packaged(_tools, "tritonclient"),
)


def _perf(place: Environment, *more: str) -> list[str]:
    program = place.tools / "perf" / "perf_analyzer"
    return [
        str(program),
        "-u",
        place.address,
        f"--measurement-interval={PERF_SECONDS * 1000}",
        "-s",
        "60",
        *more,
    ]


def _perf_tensors(place: Environment) -> list[str]:
    ids = [101, *range(2000, 2014), 102]
    row = {
        "input_ids": {"content": ids, "shape": [16]},
        "attention_mask": {"content": [1] * 16, "shape": [16]},
    }
    data = place.work / "rows.json"
    data.write_text(json.dumps({"data": [row]}))
    more = ["-m", place.embedding, "-i", "http", "-b", "4", "--concurrency-range", "1:4:3"]
    return _perf(place, *more, "--input-data", str(data))


def _perf_chat(place: Environment) -> list[str]:
    asked = {
        "model": place.text,
        "messages": [{"role": "user", "content": "What does len do?"}],
        "max_tokens": 8,
    }
    data = place.work / "chats.json"
    data.write_text(json.dumps({"data": [{"payload": [asked]}]}))
    more = ["-m", place.text, "--service-kind", "openai", "--endpoint", "v1/chat/completions", "--async"]
    return _perf(place, *more, "--input-data", str(data), "--concurrency-range", "2:2")


def _perf_tool(name: str, command: Callable[[Environment], list[str]]) -> Tool:
    return Tool(
        name,
        lambda place: (place.tools / "perf" / "perf_analyzer", MAKE),
        command,
        lambda place: "of tritonclient 2.50.0",
        _with("Concurrency: ", "Throughput", "Avg latency", "p99", "Request count", "Failed", "rror"),
        lambda done: _error(done) or ("" if "throughput: " in done.stdout else "no throughput was printed"),
        lambda place: {"LD_LIBRARY_PATH": str(place.tools / "perf")},
    )


PERF_ANALYZER = _perf_tool("perf_analyzer, tensors", _perf_tensors)
PERF_OPENAI = _perf_tool("perf_analyzer, openai", _perf_chat)


def _comply_fault(done: Done) -> str:
    """Return the fault of a run of llm-comply, which exits with 1 when anything fails.

    Pictures are refused, as they should be, and so small a model never ends its turn (a scripted engine does in
    tests/serve/api/test_conformance.py).
    """
    if not done.stdout:
        return _error(done)
    failed = [one for one in json.loads(done.stdout)["results"] if one["status"] == "failed"]
    found = [one["id"] for one in failed if not all("got 'length'" in error for error in one["errors"])]
    return ", ".join(one for one in found if one != "chat-image-input")


def _comply_digest(text: str) -> list[str]:
    found = json.loads(text[: text.rindex("}") + 1])["results"]
    return [
        f"{one['id']}: {one['status']} {' '.join(map(str, one.get('errors') or []))[:120]}" for one in found
    ]


COMPLY = Tool(
    "llm-comply",
    lambda place: (place.comply / "bin" / "llm-comply", "make conformance"),
    lambda place: [
        *(str(place.comply / "bin" / "llm-comply"), "-u", f"http://{place.address}/v1", "-m", place.text),
        *("-k", "none", "--format", "openai-chat", "--json"),
    ],
    _packaged(lambda place: place.comply / "bin" / "python", "llm-comply"),
    _comply_digest,
    _comply_fault,
)
AIPERF = Tool(
    "aiperf",
    lambda place: (place.tools / "bin" / "aiperf", MAKE),
    lambda place: [
        *(
            str(place.tools / "bin" / "aiperf"),
            "profile",
            "--model",
            place.text,
            "--url",
            f"http://{place.address}",
        ),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(place.artifact), "--concurrency", "2"),
        *(
            "--request-count",
            "12",
            "--synthetic-input-tokens-mean",
            "40",
            "--output-tokens-mean",
            "12",
            "--ui",
            "none",
        ),
    ],
    _packaged(_tools, "aiperf"),
    _with("Time to First", "Inter Token", "Request Latency", "Request Throughput", "Request Count", "rror"),
    env=lambda place: {"HF_HUB_OFFLINE": ""},  # with it, 0.13 takes a folder for the name of a repository
)
