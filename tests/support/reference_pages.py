"""docs/cli.md and docs/api.md, from the definitions of options, the command line and the public docstrings."""

from __future__ import annotations

import html
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import typer

import infer
import infer.serve
from infer.budget_search.run_search import SearchResult, SearchTrial
from infer.budgets import Budgets
from infer.cli import application
from infer.live.compiled_model import CompiledModel
from infer.live.recording import Recording, Replacement
from infer.llm.completion import Completion, CompletionChunk, Score
from infer.llm.engine.sampling.sampling_options import OPTIONS
from infer.options import Field, command_line, fields, to_toml
from infer.plan import Plan
from infer.predict.generation_options import Options
from infer.predict.sentence_modules import cross_encoder, sentence_transformer
from infer.pretrained.classes import CLASSES
from infer.pretrained.model import InferModel
from infer.run.publish import Outcome
from infer.serve.limits import ServeLimits
from infer.serve.options import ServeOptions
from infer.tune.settings import AdapterSettings, DistilSettings, TrainSettings
from infer.tune.training_folder import TrainingReport

WRITTEN = "Written by `make docs-reference`; a test compares."
EXIT_CODES = {
    0: "done",
    1: "internal error, a bug in infer",
    2: "usage: an option, a name or an input is wrong",
    3: "bad file or artifact, or untrusted code",
    4: "a gate refused: less faithful or slower than allowed",
    5: "not usable: this machine or this model can't do it",
    6: "busy, or the output exists",
    7: "out of memory or disk",
    130: "interrupted",
}
WIDTH = 100


# --- docs/cli.md
def cli_page() -> str:
    """Every command with its arguments and options, the plan file, and exit codes."""
    commands = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    lines = [
        "# Command line",
        "",
        f"All commands of `infer`, as `infer COMMAND --help` shows them. {WRITTEN}",
        "",
    ]
    lines += ["| command | what it does |", "|---|---|"]
    for name, command in commands.items():
        first = " ".join(command.help.split("\n\n")[0].split())
        lines.append(f"| [`infer {name}`](#infer-{name}) | {_cell(first)} |")
    for name, command in commands.items():
        lines += ["", f"## infer {name}", "", command.help, "", "```text", _usage(name, command), "```"]
        lines += _options(command)
    lines += ["", "`--debug` before or after any command shows where an error came from.", ""]
    lines += [*_plan_file(), "", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(lines) + "\n"


def _usage(name: str, command: Any) -> str:
    named = [param for param in command.params if param.param_type_name == "argument"]
    words = [str(param.metavar or param.name.upper()) for param in named]
    shown = [
        word if param.required else f"[{word.strip('[]')}]" for word, param in zip(words, named, strict=True)
    ]
    many = [f"{word}..." if param.nargs == -1 else word for word, param in zip(shown, named, strict=True)]
    return " ".join(["infer", name, "[OPTIONS]", *many])


def _options(command: Any) -> Iterator[str]:
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if param.name != "help":
            kind = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or "Options"
            panels.setdefault(kind, []).append(param)
    for panel, params in panels.items():
        head = "argument" if panel == "Arguments" else "option"
        yield from ("", f"{panel}:", "", f"| {head} | default | description |", "|---|---|---|")
        for param in params:
            yield f"| {_spelling(param)} | {_default(param)} | {_cell(_help(param))} |"


def _spelling(param: Any) -> str:
    if param.param_type_name == "argument":
        return _code(str(param.metavar or param.name.upper()))
    names = [*param.opts, *param.secondary_opts]
    value = "" if param.is_flag or param.count else f" {param.metavar or _value_name(param)}"
    return ", ".join(_code(f"{name}{value}") for name in names)


def _value_name(param: Any) -> str:
    """Name the kind of value, in capitals, where the option has no name for it."""
    text = str(param.type_descriptor.annotation)
    kinds = {"int": "N", "float": "X", "Path": "PATH", "Literal": "CHOICE"}
    return next((name for kind, name in kinds.items() if kind in text), "TEXT")


def _default(param: Any) -> str:
    shown = getattr(param, "show_default", None)
    if isinstance(shown, str):
        return f"`{shown}`"
    if param.required or param.default in (None, "") or param.default is False or callable(param.default):
        return ""
    return "on" if param.default is True else f"`{param.default}`"


def _help(param: Any) -> str:
    text = (param.help or "").replace("\\[", "[")
    return f"{text} (environment: `{param.envvar}`)" if getattr(param, "envvar", None) else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    """Return code for a table's cell; MkDocs shows the backslash of an escaped pipe between backquotes."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _plan_file() -> list[str]:
    """List the keys of a plan file, and the flag of each."""
    plan = Plan(
        source="model.pt",
        model="model.py:build",
        quant="int8",
        layers={"head": "float"},
        data="rows.npz",
        max_batch=16,
    )
    words = shlex.join(["infer", "optimize", *command_line(plan)])
    rows = [f"| `{f.name}` | {_flag(f)} | {_json(f.default)} |" for f in fields(Plan) if f.name != "source"]
    return [
        "## Plan file",
        "",
        "`infer optimize SOURCE --plan FILE` takes its options from the `manifest.json` of an artifact or from a TOML",
        "file; `--save-plan FILE` writes one. Options on the command line come before those of the file. Trust",
        "is never taken from a file: only `--trust-code` itself opens files that hold code. The line",
        "",
        "```text",
        words,
        "```",
        "",
        "is the file",
        "",
        "```toml",
        to_toml(plan).strip(),
        "```",
        "",
        "| key | option | default |",
        "|---|---|---|",
        *rows,
    ]


def _flag(field: Field) -> str:
    return f"`{field.flag}`" if field.flag else ""


def _json(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(msgspec.to_builtins(value))}`"


# --- docs/api.md
def api_page() -> str:
    """Write the public names of `infer` and `infer.serve`: signatures and docstrings."""
    lines = ["# Python API", "", f"The public names of `infer` and `infer.serve`. {WRITTEN}", ""]
    lines += ["```python", "from infer import Budgets, Plan, Predictor, compile, optimize, search", "```"]
    order = [
        "compile",
        "record",
        "replace",
        "restore",
        "optimize",
        "Plan",
        "search",
        "Budgets",
        "Predictor",
        "train_adapter",
        "AdapterSettings",
        "distil",
        "DistilSettings",
        "TrainSettings",
    ]
    order += ["TensorSpec", "Finding", "InferError"]
    assert sorted([*order, "__version__"]) == sorted(infer.__all__)
    for name in order:
        lines += _section(f"infer.{name}", getattr(infer, name))
        if name == "compile":
            lines += _section("CompiledModel", CompiledModel)
    lines += _models()
    lines += [
        "",
        "## Generation options",
        "",
        *_doc(Options),
        "",
        "| option | type | description |",
        "|---|---|---|",
    ]
    for name, kind in get_type_hints(Options).items():
        lines.append(f"| `{name}` | {_code(_kind(kind))} | {OPTIONS[name].option.help} |")
    lines += ["", "## Results", "", "What methods return that are no arrays."]
    for kind in (
        Outcome,
        Recording,
        Replacement,
        SearchResult,
        SearchTrial,
        TrainingReport,
        Completion,
        CompletionChunk,
        Score,
    ):
        lines += ["", f"### {kind.__name__}", "", *_doc(kind), "", "| field | type |", "|---|---|"]
        hints = get_type_hints(kind)
        lines += [f"| `{n}` | {_code(_kind(hint))} |" for n, hint in hints.items() if not n.startswith("_")]
        lines += [f"| `{n}` | {_doc(p)[0]} |" for n, p in vars(kind).items() if isinstance(p, property)]
    for name in ("run", "start", "ServeOptions", "ServeLimits"):
        lines += _section(f"infer.serve.{name}", getattr(infer.serve, name))
    return "\n".join(lines) + "\n"


def _models() -> Iterator[str]:
    """List the classes for transformers and sentence-transformers."""
    yield from ("", "## Models of transformers", "", *_doc(InferModel), "")
    yield from (
        "| class | called as | of artifacts of the task | `export=True` asks for |",
        "|---|---|---|---|",
    )
    for kind in CLASSES.values():
        asked = ", ".join(f'`{name}="{value}"`' for name, value in kind.asked.items())
        yield f"| `infer.{kind.__name__}` | `{kind.auto_model_class.__name__}` | {kind.task} | {asked} |"
    for function in (sentence_transformer, cross_encoder):
        yield from _section(f"infer.{function.__name__}", function)


def _section(name: str, thing: Any) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    if not inspect.isclass(thing):
        yield from ("```python", _signature(name.rpartition(".")[2], thing), "```", "")
    yield from _doc(thing)
    if thing in (Plan, Budgets, AdapterSettings, DistilSettings, TrainSettings, ServeOptions, ServeLimits):
        yield from ("", "| field | type | default | description |", "|---|---|---|---|")
        for field in fields(thing):
            kind = _kind(field.type)
            default = "" if field.default is msgspec.NODEFAULT else _json(field.default)
            default = f"`{kind}()`" if isinstance(field.default, msgspec.Struct) else default
            help = f"false: {field.option.help}" if field.option.negative else field.option.help
            yield f"| `{field.name}` | {_code(kind)} | {default} | {_cell(help)} |"
    elif inspect.isclass(thing):
        yield from _members(name.rpartition(".")[2], thing)


def _members(owner: str, kind: type) -> Iterator[str]:
    """Public methods and properties with a docstring, base classes first."""
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("infer."):
            continue
        for name, member in vars(base).items():
            found = getattr(member, "__func__", getattr(member, "fget", member))
            if name.startswith("_") or not inspect.isfunction(found) or not found.__doc__:
                continue
            if getattr(getattr(kind, name), "__func__", None) not in (None, found):
                continue  # overridden
            yield from ("", f"### {owner}.{name}", "")
            if not isinstance(member, property):
                yield from ("```python", _signature(name, found), "```", "")
            yield from _doc(found)


class _Name:
    """An annotation that prints as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    shown = [
        p.replace(annotation=_Name(p.annotation) if isinstance(p.annotation, str) else p.annotation)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    returns = f" -> {signature.return_annotation}"
    line = f"{name}{inspect.Signature(shown)}{returns}"
    if len(line) <= WIDTH:
        return line
    parts, stars = [], False
    for p in shown:
        if p.kind is p.KEYWORD_ONLY and not stars:
            parts.append("*")
        stars = stars or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        parts.append(str(p))
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _doc(thing: Any) -> list[str]:
    return inspect.cleandoc(thing.__doc__ or "").splitlines()


def _kind(hint: Any) -> str:
    """Format a type as it is written, without modules."""
    text = str(hint) if get_args(hint) else getattr(hint, "__name__", str(hint))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
