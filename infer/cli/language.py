"""`infer generate` and `infer chat`: arguments of language models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..errors import UsageError

Artifact = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="a language model made by `infer optimize`")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout, nothing else")]
Trust = Annotated[bool, typer.Option("--trust-code", help="open files that hold code")]
MaxTokens = Annotated[int | None, typer.Option(help="at most so many tokens; default: 256, or what fits")]
Temperature = Annotated[float | None, typer.Option(help="0: always the most likely token")]
TopK = Annotated[int | None, typer.Option(help="choose among so many of the most likely")]
TopP = Annotated[float | None, typer.Option(help="choose among the most likely that make up this share")]
MinP = Annotated[float | None, typer.Option(help="leave out what is less likely than this share of the best")]
Penalty = Annotated[float | None, typer.Option(help="above 1: less of what was there before")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]
Stop = Annotated[list[str] | None, typer.Option(help="end before this text, repeatable")]
KvMemory = Annotated[
    str | None, typer.Option(help="memory of the KV cache, like 2GiB; default: a share of what is free")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all", min=1)]


def generate(
    artifact: Artifact,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT|-]", help="text; - or nothing reads stdin")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option("-n", "--n", help="completions of the prompt")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="with --json: of each token and so many others")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="go on after the end of the text")] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="the output is JSON that this schema (a file) describes")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="the output matches this")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="the output is one of these, repeatable")] = None,
    stream: Annotated[
        bool | None, typer.Option(help="print while it is made; default: on a terminal")
    ] = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    trust_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt."""
    from ..predict import Predictor, rehearsal

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
    rehearsal.rehearse(artifact, trust_code=trust_code)
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
    artifact: Artifact,
    system: Annotated[str | None, typer.Option(help="what the model is told first")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="of an answer; default: 1024, or what fits")] = None,
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
    """Talk to a model in the terminal; lines of a pipe are messages, too."""
    from ..predict import Predictor, rehearsal
    from .chatting import Chat

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
    rehearsal.rehearse(artifact, trust_code=trust_code)
    with Predictor.load(artifact, threads=threads, trust_code=trust_code, kv_memory=kv_memory) as predictor:
        Chat(predictor, system, options).run()


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
