"""Arguments in, sentences out. Exit codes: 0 done · 1 internal · 2 usage · 3 bad file or artifact · 4 a gate refused ·
5 not usable on this machine · 6 busy or exists · 7 out of memory or disk · 130 interrupted."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InferError
from ..printable import plain
from . import language, optimize, serve
from .arguments import Artifact, AsJson, Trust

INTERRUPTED = 130
MAX_SENTENCE = 4096  # characters

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Shrink a trained model, lower it, check it against the original, serve it.",
)

app.command()(optimize.optimize)


@app.command()
def predict(
    artifact: Artifact,
    input: Annotated[str, typer.Argument(help=".npz, .npy, .json, a text file, or - for text on stdin")],
    output: Annotated[Path | None, typer.Option(help=".npz or .json; default: JSON on stdout")] = None,
    trust_code: Trust = False,
) -> None:
    """Run an artifact on a file of inputs."""
    from ..predict import Predictor, rehearsal
    from . import files

    rehearsal.rehearse(artifact, trust_code=trust_code)
    with Predictor.load(artifact, trust_code=trust_code) as predictor:
        files.write(files.answer(predictor, input), output)


app.command()(language.generate)
app.command()(language.chat)


@app.command()
def bench(
    artifact: Artifact,
    vs: Annotated[Path | None, typer.Option(help="another artifact, run in turn with this one")] = None,
    batch: Annotated[
        str | None, typer.Option(help="batch sizes; default: 1,2,4,8,16, of a language model 1,8")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="of a language model: tokens of the prompts, like 128,512")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="of a language model: tokens decoded after each prompt", min=2)
    ] = 32,
    seconds: Annotated[float, typer.Option(help="time per batch size (and context)", min=0.05)] = 1.0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="also write the JSON document here")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="write a profiler trace here (open it in Perfetto)")
    ] = None,
    trust_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Latency percentiles, throughput, memory and the roofline of an artifact; tokens, of a language model."""
    from .. import bench as measuring
    from ..predict import rehearsal
    from . import benching

    for opened in (artifact, vs):
        if opened is not None:
            rehearsal.rehearse(opened, trust_code=trust_code)
    result = benching.measured(
        artifact,
        batch=batch,
        context=context,
        tokens=tokens,
        vs=vs,
        seconds=seconds,
        threads=threads,
        trust_code=trust_code,
    )
    if output:
        output.write_bytes(measuring.encode(result))
    if profile:
        measuring.profile(artifact, profile, trust_code=trust_code)
    benching.show(result, as_json=as_json)


app.command()(serve.serve)
app.command()(serve.top)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="an artifact or a model file; nothing in it is executed")],
    as_json: AsJson = False,
) -> None:
    """Say what a file or an artifact holds, from its headers alone."""
    from .. import inspection
    from . import show

    show.facts(inspection.inspect(path), as_json=as_json)


@app.command()
def verify(artifact: Artifact, trust_code: Trust = False, as_json: AsJson = False) -> None:
    """Check every hash, the signature, and the golden inputs of an artifact."""
    from .. import inspection
    from ..predict import rehearsal
    from . import show

    rehearsal.rehearse(artifact, trust_code=trust_code)
    show.facts(inspection.verify(artifact, trust_code=trust_code), as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What can run on this machine, what can't and why, and versions that clash."""
    from .. import inspection
    from . import show

    show.doctor(inspection.doctor(), as_json=as_json)


@app.command()
def report(
    artifact: Artifact,
    html: Annotated[Path | None, typer.Option(help="write the HTML page here")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the report that an artifact carries."""
    from .. import inspection
    from ..report.html import render_html
    from . import show

    document = inspection.report(artifact)
    if html:
        html.write_text(render_html(document))
    show.report(document, as_json=as_json, path=artifact)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are one sentence on stderr."""
    signal.signal(signal.SIGTERM, _terminate)
    debug = "--debug" in (arguments if arguments is not None else sys.argv)
    given = [a for a in (arguments if arguments is not None else sys.argv[1:]) if a != "--debug"]
    try:
        result: Any = app(given, standalone_mode=False)
        if result == INTERRUPTED:  # typer turns the exception into its exit code, without a word
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was published", INTERRUPTED)
    except InferError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), error.exit_code, error.code if "--json" in given else "")
    except typer.TyperException as error:  # type: ignore[attr-defined]
        return _fail(str(error), 2)
    except Exception as error:
        if debug:
            raise
        from .. import failures

        if refusal := failures.resource(error):
            return _fail(str(refusal), refusal.exit_code, refusal.code if "--json" in given else "")
        return _fail(
            f"internal error, a bug in infer: {type(error).__name__}: {error}. --debug shows where", 1
        )


def _fail(sentence: str, code: int, kind: str = "") -> int:
    sentence = plain(sentence, MAX_SENTENCE)  # names and values of foreign files are in it
    if kind:
        print(json.dumps({"error": {"code": kind, "message": sentence, "exit_code": code}}))
    print(f"infer: {sentence}", file=sys.stderr)
    return code


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
