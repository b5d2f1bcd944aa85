"""`infer generate` and `infer chat`: text from a language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..artifact.artifact_of_source import artifact_of
from ..errors import UsageError
from ..llm.completion import Completion
from ..llm.engine.sampling.sampling_options import CONSTRAINTS, GenerationOptions
from ..options import from_values
from ..plan import SERVED, Plan
from .options import Threads, Trust, with_some_options

LanguageModel = Annotated[
    str,
    typer.Argument(
        metavar="ARTIFACT",
        help="a language model made by `infer optimize`; or a source, as a name on the Hub (ORG/NAME) or a .gguf file, "
        "which is optimized at its first use and kept in the cache",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout, nothing else")]
KvMemory = Annotated[
    str | None, typer.Option(help="memory of the KV cache, like 2GiB; default: a share of what is free")
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="smaller model of the same vocabulary that drafts tokens: an artifact, or what `infer optimize` takes",
    ),
]


SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")


OF_SOURCE = (Plan, dict.fromkeys(SERVED))


@with_some_options(
    (
        GenerationOptions,
        {
            "max_tokens": None,
            **dict.fromkeys(SHARED),
            "n": None,
            "logprobs": "with --json: log probability of each token, and of this many alternatives",
            "ignore_eos": None,
            "regex": None,
            "choice": None,
            "src_lang": None,
            "tgt_lang": None,
        },
    ),
    OF_SOURCE,
)
def generate(
    options: dict[str, Any],
    of_source: dict[str, Any],
    artifact: LanguageModel,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT|-]", help="text to continue; - or nothing reads it from stdin"),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="file of a JSON schema that the output must match", rich_help_panel=CONSTRAINTS),
    ] = None,
    stream: Annotated[
        bool | None, typer.Option(help="print text as it is generated; default: on a terminal")
    ] = None,
    draft: Draft = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    trust_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt.

    Options of quantization, target and data are for a source; it takes all others through `infer optimize`.
    """
    from ..predict import isolated_open
    from ..predict.predictor import Predictor

    if json_schema is not None:
        options["json_schema"] = _schema(json_schema)
    text = _prompt(prompt)
    wants_stream = stream if stream is not None else sys.stdout.isatty() and not as_json
    if wants_stream and options.get("n", 1) > 1:
        raise UsageError(f"--stream shows one completion, not {options['n']}")
    folder = _artifact(artifact, of_source, trust_code=trust_code)
    given = _opened(draft, threads=threads, trust_code=trust_code, kv_memory=kv_memory)
    isolated_open.open_in_subprocess(folder, trust_code=trust_code)
    with Predictor.load(folder, **given) as predictor:
        if wants_stream:
            _stream(predictor, text, options, as_json=as_json)
            return
        completions = predictor.generate(text, **options)
        rows = completions if isinstance(completions, list) else [completions]
        if as_json:
            print(_encoded(completions))
        else:
            print("\n---\n".join(row.text for row in rows))
            _say_if_empty(rows)


@with_some_options(
    (
        GenerationOptions,
        {"max_tokens": "most tokens of an answer; default: 1024, or as many as fit", **dict.fromkeys(SHARED)},
    ),
    OF_SOURCE,
)
def chat(
    options: dict[str, Any],
    of_source: dict[str, Any],
    artifact: LanguageModel,
    system: Annotated[str | None, typer.Option(help="system message, before the conversation")] = None,
    reasoning_form: Annotated[
        str,
        typer.Option(
            help="form in which the model writes thoughts, which are shown dimmed; auto: as its chat template shows; "
            "none: no text is a thought"
        ),
    ] = "auto",
    draft: Draft = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    trust_code: Trust = False,
) -> None:
    """Chat with a model in the terminal; from a pipe, every line is a message.

    Options of quantization, target and data are for a source; it takes all others through `infer optimize`.
    """
    from ..predict import isolated_open
    from ..predict.predictor import Predictor
    from .chat_session import ChatSession

    folder = _artifact(artifact, of_source, trust_code=trust_code)
    given = _opened(draft, threads=threads, trust_code=trust_code, kv_memory=kv_memory)
    isolated_open.open_in_subprocess(folder, trust_code=trust_code)
    with Predictor.load(folder, reasoning_form=reasoning_form, **given) as predictor:
        ChatSession(predictor, system, options).run()


def _artifact(named: str, of_source: dict[str, Any], *, trust_code: bool) -> Path:
    """Return the artifact, that of a source after it was optimized, which is shown on stderr."""
    plan = from_values(Plan, {"source": named, "trust_code": trust_code, **of_source})
    return artifact_of(plan, shown=True)


def _opened(draft: str | None, *, trust_code: bool, **given: Any) -> dict[str, Any]:
    """Return the arguments of `Predictor.load`, the draft model made where it is a source."""
    made = None if draft is None else _artifact(draft, {}, trust_code=trust_code)
    return {**given, "trust_code": trust_code, "draft": made}


def _prompt(given: str | None) -> str:
    if given not in (None, "-"):
        return str(given)
    if given is None and sys.stdin.isatty():
        raise UsageError(
            "no prompt", hint='Give one: infer generate ARTIFACT "Once upon"; or - and text on stdin'
        )
    return sys.stdin.read().removesuffix("\n")


def _schema(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema can't be read: {error}", where=str(path)) from error


def _stream(predictor: Any, text: str, options: dict[str, Any], *, as_json: bool) -> None:
    with predictor.stream(text, **options) as pieces:
        for piece in pieces:
            if as_json:
                print(msgspec.json.encode(piece).decode(), flush=True)
            else:
                print(piece.text, end="", flush=True)
    if not as_json:
        print()
        _say_if_empty([pieces.completion])


def _say_if_empty(rows: Sequence[Completion]) -> None:
    for why in dict.fromkeys(row.why_empty for row in rows):
        if why is not None:
            print(f"infer: {why}", file=sys.stderr)


def _encoded(completions: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(completions), indent=1).decode()
