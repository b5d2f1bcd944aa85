"""`infer generate` and `infer chat`: text from a language model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..errors import UsageError
from .options import Threads, Trust

SAMPLING, CONSTRAINTS = "Sampling", "Constrained output"

LanguageModel = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="a language model made by `infer optimize`")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout, nothing else")]
MaxTokens = Annotated[
    int | None, typer.Option(help="most tokens of the completion; default: 256, or as many as fit")
]
Temperature = Annotated[
    float | None,
    typer.Option(help="randomness; 0 always takes the most likely token", rich_help_panel=SAMPLING),
]
TopK = Annotated[
    int | None,
    typer.Option(help="sample among this many of the most likely tokens", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="sample among the most likely tokens that together have this probability",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="leave out tokens less likely than this share of the most likely one", rich_help_panel=SAMPLING
    ),
]
Penalty = Annotated[
    float | None, typer.Option(help="above 1: repeat earlier tokens less", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option(help="seed; the same one gives the same text", rich_help_panel=SAMPLING)
]
Stop = Annotated[list[str] | None, typer.Option(help="end before this text; repeatable")]
KvMemory = Annotated[
    str | None, typer.Option(help="memory of the KV cache, like 2GiB; default: a share of what is free")
]


def generate(
    artifact: LanguageModel,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT|-]", help="text to continue; - or nothing reads it from stdin"),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option("-n", "--n", help="number of completions")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(help="with --json: log probability of each token, and of this many alternatives"),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="go on after the model ends its text")] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="file of a JSON schema that the output must match", rich_help_panel=CONSTRAINTS),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(help="regular expression that the output must match", rich_help_panel=CONSTRAINTS),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="the output must be one of these; repeatable", rich_help_panel=CONSTRAINTS),
    ] = None,
    stream: Annotated[
        bool | None, typer.Option(help="print text as it is generated; default: on a terminal")
    ] = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    trust_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt."""
    from ..predict import Predictor, isolated_open

    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or None,
        "n": n,
        "logprobs": logprobs,
        "ignore_eos": ignore_eos or None,
        "json_schema": _schema(json_schema),
        "regex": regex,
        "choice": choice or None,
    }
    text = _prompt(prompt)
    wants_stream = stream if stream is not None else sys.stdout.isatty() and not as_json
    if wants_stream and n > 1:
        raise UsageError(f"--stream shows one completion, not {n}")
    isolated_open.open_in_subprocess(artifact, trust_code=trust_code)
    with Predictor.load(artifact, threads=threads, trust_code=trust_code, kv_memory=kv_memory) as predictor:
        if wants_stream:
            _stream(predictor, text, options, as_json=as_json)
            return
        found = predictor.generate(text, **options)
        rows = found if isinstance(found, list) else [found]
        if as_json:
            print(_encoded(rows if n > 1 else rows[0]))
        else:
            print("\n---\n".join(row.text for row in rows))


def chat(
    artifact: LanguageModel,
    system: Annotated[str | None, typer.Option(help="system message, before the conversation")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="most tokens of an answer; default: 1024, or as many as fit")
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    trust_code: Trust = False,
) -> None:
    """Chat with a model in the terminal; of a pipe, every line is a message."""
    from ..predict import Predictor, isolated_open
    from .chat_session import ChatSession

    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or None,
    }
    isolated_open.open_in_subprocess(artifact, trust_code=trust_code)
    with Predictor.load(artifact, threads=threads, trust_code=trust_code, kv_memory=kv_memory) as predictor:
        ChatSession(predictor, system, options).run()


def _prompt(given: str | None) -> str:
    if given not in (None, "-"):
        return str(given)
    if given is None and sys.stdin.isatty():
        raise UsageError(
            "no prompt", hint='Give one: infer generate ARTIFACT "Once upon"; or - and text on stdin'
        )
    return sys.stdin.read().removesuffix("\n")


def _schema(path: Path | None) -> Any:
    if path is None:
        return None
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


def _encoded(found: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
