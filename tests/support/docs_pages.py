"""The reference pages of docs/, from the code: `make docs-reference` writes them, a test compares."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import infer.errors
import infer.serve
from infer.errors import InferError, OverloadedError
from infer.options import fields
from infer.serve import limits
from infer.serve.api.openai.openai_errors import ERROR_FORMAT
from tests.support import reference_pages

ROOT = Path(__file__).resolve().parents[2]
WIRE = [
    (400, "malformed HTTP: framing, lengths, chunks, duplicate headers, no Host"),
    (408, "head or body not there at its deadline, or slower than the least speed"),
    (414, "request target too long"),
    (421, "a Host that is none of the server's, on loopback without keys"),
    (431, "too many headers, or too long"),
    (505, "neither HTTP/1.0 nor HTTP/1.1"),
]


def limits_page() -> str:
    """Every field of `ServeLimits` with its default and its help text."""
    lines = [
        "# Limits",
        "",
        "Every cap and default of the server. Set one with `infer serve --limit NAME=VALUE` (bytes also as 16MiB), or",
        "with `ServeLimits(NAME=VALUE)` in Python. Written by `make docs-reference`; a test compares.",
        "",
        "| name | default | meaning |",
        "|---|---|---|",
    ]
    for field in fields(limits.ServeLimits):
        lines.append(f"| `{field.name}` | {_value(field.default)} | {field.option.help} |")
    return "\n".join(lines) + "\n" + FIXED


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} Mi"
    if isinstance(value, int) and value >= 1 << 13 and value % (1 << 10) == 0:
        return f"{value >> 10} Ki"
    return f"{value:g}" if isinstance(value, float) else str(value)


FIXED = """
Of one request with files, fixed: a form has at most 64 parts, each with at most 16 headers and each field at most 64
KiB; 64 files; an image to segment, and one that transformers preprocesses, has at most 16 Mi pixels, a sound file at
most 32 channels and samples of at most 65,536. Of an animation, and of a file of several images, the first one is
decoded and no other. A JPEG of more than 10 Mi pixels may have fewer scans than the limit: at least 16, and 1 Gi pixels
in all of them. Files are decoded in processes that are killed at their limits, at the request's deadline (504) and when
the client leaves. With C cores (at most 4), C + 1 files are decoded at once, and as many slow ones that took longer
than half a second; one client, told apart by its API key or its address, has at most C of each, and at most 128 of its
files wait.

Of one request for text, fixed: `n` 1 to 16, `stop` at most 16 of at most 1024 characters, `bad_words` at most 64 of at
most 128, `logprobs` and `top_logprobs` at most 20, `logit_bias` at most 1024 tokens, prompts at most 1024, messages
(items) at most 4096, tools at most 128, token ids 0 to the vocabulary's size. A tensor has at most 16 dimensions.
A model's name is
`[A-Za-z0-9][A-Za-z0-9._-]{0,127}`. A chat template may take one second of CPU time, a tokenizer five and one more
for each 100,000 characters, each in a process that is killed then. A grammar is at most 64 KiB of JSON, 64
levels deep, and may take 3 s of CPU time and 128 MiB of memory to compile, in a process of its own; one client compiles
one long grammar at a time, at most 12 s of them at once and 12 s a minute.

With two API keys or more, each may have its share of a model's queue (the limit, over the keys that wait) where the
queue is full, so that together they may have up to twice the limit; alone it may have all of it.

Connections follow the limit of open files: where `ulimit -n` allows fewer, the server says so at its start.
"""


def errors() -> list[type[InferError]]:
    """Every class of error that the package defines."""
    for found in pkgutil.walk_packages(infer.serve.__path__, "infer.serve."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    known, queue = list[type[InferError]](), [InferError]
    while queue:
        kind = queue.pop(0)
        if kind.__module__.startswith(("infer.errors", "infer.serve.")):
            known.append(kind)
            queue += kind.__subclasses__()
    return sorted(set(known), key=lambda kind: (kind.status, kind.code, kind.__name__))


def errors_page() -> str:
    """Every error: its code, exit code and status, and what its docstring says."""
    lines = [
        "# Errors",
        "",
        'KServe and ops routes answer `{"error": "<text>"}`, OpenAI routes',
        '`{"error": {"message", "type", "param", "code"}}`, Anthropic routes',
        '`{"type": "error", "error": {"type", "message"}}`; all with `X-Request-Id`. `code` is the one below. A text',
        "says what was expected, what came and where, in one line of at most 1024 characters. Once a stream has begun,",
        "an error comes as the last event, and no `[DONE]` follows; that of /v1/responses is `response.failed`.",
        "Written by `make docs-reference`; a test compares.",
        "",
        "| code | HTTP status | exit code | class | what |",
        "|---|---|---|---|---|",
    ]
    for kind in errors():
        status = str(kind.status)
        if issubclass(kind, OverloadedError):
            status = f"{kind.status}, on OpenAI and Anthropic routes {ERROR_FORMAT.status(kind(''))}"
        lines.append(f"| `{kind.code}` | {status} | {kind.exit_code} | `{kind.__name__}` | {_what(kind)} |")
    lines += [
        "",
        'Refused before there is a route, as `{"error": "<phrase>"}`, and the connection is closed:',
        "",
    ]
    lines += ["| HTTP status | when |", "|---|---|", *(f"| {status} | {when} |" for status, when in WIRE)]
    lines += [
        "",
        "Status 499 is never sent: it counts requests whose client hung up. 503 and 429 carry `Retry-After` and",
        "`retry-after-ms`. The command line's other exit codes: 0 done, 130 interrupted.",
    ]
    return "\n".join(lines) + "\n"


TREE = dict(re.findall(r"(\w+Error) +\d \s*\d{3}   (\S.*)", infer.errors.__doc__ or ""))
SAID = {
    "ContextLengthError": "prompt and completion are longer than the model's context",
    "UnauthorizedError": "no API key, or none that is known",
    "ModelNotFoundError": "no model of that name is served",
    "SlowBodyError": "the body did not arrive in time, or too slowly",
    "NotFoundError": "no such address, model or version",
    "TooLargeError": "the body, or the JSON in it",
    "UnsupportedMediaError": "content type or encoding",
    "DeadlineError": "the time of the request ran out, in the queue or while it ran",
    "NotReadyError": "starting, or draining",
    "ServeError": "only over HTTP; the base of what follows",
    "PoisonError": "the worker crashed on the request twice; it is not run again",
    "WorkerDiedError": "the worker died, and the request could not be retried",
}


def _what(kind: type[InferError]) -> str:
    doc = (kind.__dict__.get("__doc__") or "").strip().splitlines()
    text = doc[0].rstrip(".") if doc else ""
    return (
        SAID.get(kind.__name__)
        or TREE.get(kind.__name__)
        or re.sub(r"^[A-Z](?=[a-z])", lambda first: first[0].lower(), text)
    )


DECISIONS = {
    "01": "Loading and compression",
    "02": "Kernels and attention",
    "03": "Graphs, ONNX, backends, artifacts",
    "04": "Language models and training",
    "05": "Runs, fidelity, timing, searches",
    "06": "Serving",
    "07": "Benchmarks, project, tests",
}


def decisions_page() -> str:
    """Every decision in force by the first line of its record."""
    lines = [
        "# Decisions",
        "",
        "Decisions in force, a record each: why it had to be decided, what holds, what was rejected, and the",
        "figures. A record is changed or deleted with the code that it is about; git keeps the old ones. What was",
        "tried and lost is in [failed experiments](failed-experiments.md). Written by `make docs-reference`; a test",
        "compares.",
    ]
    for start, section in DECISIONS.items():
        lines += ["", f"## {section}", ""]
        for path in sorted((ROOT / "docs" / "decisions").glob(f"{start}*.md")):
            title = path.read_text().partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


PAGES = {
    "docs/limits.md": limits_page,
    "docs/errors.md": errors_page,
    "docs/cli.md": reference_pages.cli_page,
    "docs/api.md": reference_pages.api_page,
    "docs/decisions/index.md": decisions_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())
