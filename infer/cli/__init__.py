"""The command line: one file for each command, no logic of its own.

Exit codes: 0 done · 1 internal · 2 usage · 3 bad file or artifact · 4 a gate refused ·
5 not usable on this machine · 6 busy or exists · 7 out of memory or disk · 130 interrupted ·
128 + n ended by signal n.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Iterable
from typing import Any

import typer

from ..errors import InferError
from ..paths import remove_unfinished
from ..sanitize import sanitize_text

INTERRUPTED = 130
MAX_MESSAGE = 4096  # characters
ENDING = (signal.SIGTERM, signal.SIGHUP)

COMMANDS = {  # command → the module of its function, in the order of `infer --help`
    "optimize": "optimize",
    "predict": "predict",
    "generate": "generate",
    "chat": "generate",
    "bench": "bench",
    "serve": "serve",
    "top": "top",
    "inspect": "inspection",
    "verify": "inspection",
    "doctor": "inspection",
    "report": "inspection",
    "trials": "trials",
    "export": "export",
    "tune": "tune",
    "distil": "distil",
    "mcp": "mcp",
}


def application(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Make the command line of these commands, of which only the modules are imported."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Optimize a trained model, check it against the original, and serve it.",
    )
    app.callback()(_nothing)  # a command that is alone keeps its name
    for name in names:
        command = getattr(importlib.import_module(f".{COMMANDS[name]}", __package__), name)
        paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
        app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)
    return app


def _nothing() -> None:
    return


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. An error is one line on stderr, of a terminal broken at words."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _terminate)
    words = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in words
    words = [argument for argument in words if argument != "--debug"]
    try:
        app = application(words[:1] if COMMANDS.keys() & words[:1] else COMMANDS)
        result: Any = app(words, standalone_mode=False)
        if result == INTERRUPTED:  # typer turns the exception into its exit code, without a word
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except SystemExit:
        remove_unfinished()
        raise
    except KeyboardInterrupt as interrupt:
        remove_unfinished()
        return _fail(str(interrupt) or "interrupted; nothing was published", INTERRUPTED)
    except InferError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), error.exit_code, error.code if "--json" in words else "")
    except typer.TyperException as error:  # type: ignore[attr-defined]
        return _fail(_usage_message(error, words), 2)
    except Exception as error:
        if debug:
            raise
        from .. import library_errors

        if refusal := library_errors.as_resource_error(error):
            return _fail(str(refusal), refusal.exit_code, refusal.code if "--json" in words else "")
        return _fail(
            f"internal error, a bug in infer: {type(error).__name__}: {error}. --debug shows where", 1
        )


def _usage_message(error: Exception, words: list[str]) -> str:
    """Return the message of a parser error; for an unknown option with the nearest known one."""
    option = getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        return text or "expected a command, got none. The commands are listed above"
    nearest = difflib.get_close_matches(option, error.possibilities or (), n=1, cutoff=0)
    hint = f"Did you mean {nearest[0]}?" if nearest else f"infer {words[0]} --help lists the options"
    return f"no option named {option!r}. {hint}"


def _fail(message: str, code: int, kind: str = "") -> int:
    message = sanitize_text(message, MAX_MESSAGE)  # it may hold names and values of untrusted files
    if kind:
        print(json.dumps({"error": {"code": kind, "message": message, "exit_code": code}}))
    lines = [f"infer: {message}"]
    if sys.stderr.isatty():  # paths and commands stay whole, to be copied
        width = shutil.get_terminal_size().columns
        lines = textwrap.wrap(lines[0], width, break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=sys.stderr)
    return code


def _terminate(signum: int, frame: Any) -> None:
    for number in ENDING:  # a second one would end the removal of files
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + signum)
