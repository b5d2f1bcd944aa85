"""Command line options: made from the fields of a struct (see `infer.options`), and those that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import typer
from rich.markup import escape
from typer.models import ArgumentInfo

from ..errors import UsageError
from ..options import Field, fields, from_values, range_fault

S = TypeVar("S", bound=msgspec.Struct)
CONTEXT = "context"  # the parameter by which typer passes what was typed

Artifact = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="a folder NAME.infer made by `infer optimize`")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, nothing else")]
Trust = Annotated[bool, typer.Option("--trust-code", help="open files that hold code, which then runs here")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all", min=1)]


def with_options(
    kind: type[S], groups: Sequence[str], *more: type[msgspec.Struct]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command whose first parameter is a `kind`, followed by one of each of `more`; a parameter `given`
    after them gets the names of options typed.

    Typer sees one parameter for each field, then the command's own. `groups`: the panels of --help, in order.
    """
    kinds: list[type[msgspec.Struct]] = [kind, *more]
    offered = [field for each in kinds for field in fields(each)]
    ordered = sorted(offered, key=lambda field: groups.index(field.option.group) if field.flag else -1)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        after = len(kinds)
        wants_given = list(inspect.signature(command).parameters)[after : after + 1] == ["given"]

        def run(context: typer.Context, **typed: Any) -> Any:
            texts = {field.name: _from_typer(field, typed.pop(field.name)) for field in offered}
            structs = [
                from_values(each, {f.name: texts[f.name] for f in fields(each) if texts[f.name] is not None})
                for each in kinds
            ]
            if wants_given:
                typed["given"] = {name for name in texts if _was_given(context, name)}
            return command(*structs, **typed)

        return _typer_command(run, command, list(map(parameter, ordered)), own_from=after + wants_given)

    return decorate


def with_some_options(
    *kinds: tuple[type[msgspec.Struct], Mapping[str, str | None]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command whose first parameters are dicts of some options of each kind, of those that were typed.

    With each kind come their names, each with its help text where the command has its own. A number out of its range
    is a `UsageError`; what is absent gets its default, or the model's recommendation, later.
    """
    known = [{field.name: field for field in fields(kind) if field.name in helps} for kind, helps in kinds]
    helps = {name: help for _, own in kinds for name, help in own.items()}
    every = {name: field for own in known for name, field in own.items()}
    optional = [_optional(every[name], help) for name, help in helps.items()]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(context: typer.Context, **typed: Any) -> Any:
            values = {field.name: _from_typer(field, typed.pop(field.name)) for field in optional}
            given = {n: v for n, v in values.items() if v is not None and _was_given(context, n)}
            for name, value in given.items():
                if fault := range_fault(every[name].option, every[name].flag, value):
                    raise UsageError(fault)
            return command(*({n: v for n, v in given.items() if n in own} for own in known), **typed)

        return _typer_command(run, command, list(map(parameter, optional)), own_from=len(kinds))

    return decorate


def _optional(field: Field, help: str | None) -> Field:
    """Return the option without default and range, which `run` checks; with the command's own help text, if any."""
    option = field.option
    help = help or (f"{option.help}; repeatable" if option.repeat else option.help)
    option = replace(option, help=help, minimum=None, above=None, maximum=None)
    return field._replace(option=option, default=field.default if field.plain_type is bool else None)


def _typer_command(
    run: Callable[..., Any], command: Callable[..., Any], offered: list[inspect.Parameter], *, own_from: int
) -> Callable[..., Any]:
    """Return `command` with the signature that typer reads: parameters `offered`, then its own from `own_from` on."""

    def typed(**values: Any) -> Any:
        return run(values.pop(CONTEXT), **values)

    own_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[own_from:]
    context = inspect.Parameter(CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ordered = [
        context,
        *sorted((*offered, *own_parameters), key=_is_option),
    ]  # arguments first, also in --help
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    typed.__doc__, typed.__name__ = command.__doc__, command.__name__
    return typed


def _is_option(parameter: inspect.Parameter) -> bool:
    return not any(isinstance(part, ArgumentInfo) for part in get_args(parameter.annotation))


def _was_given(context: typer.Context, name: str) -> bool:
    """Return True for an option of the command line or the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def parameter(field: Field) -> inspect.Parameter:
    """Make the parameter by which typer offers one option; what typer can't convert comes as text."""
    option = field.option
    required = field.default is msgspec.NODEFAULT
    if not field.flag:
        kind: Any = str if field.plain_type else list[str]
        info: Any = typer.Argument(help=escape(option.help), metavar=option.metavar)
        return _parameter(field.name, kind, info, ... if required else field.default)
    info = typer.Option(
        *_declarations(field),
        help=escape(option.help),
        rich_help_panel=option.group,
        metavar=option.metavar,
        envvar=option.envvar,
        min=_bound(field, option.minimum),
        max=_bound(field, option.maximum),
        show_default=True if option.shown_default is None else option.shown_default,
    )
    kind = list[str] if option.repeat else Path if option.path else str
    if option.parse is None and not option.repeat and not option.path:
        kind = field.type if get_origin(field.type) is Literal else field.plain_type or str
    return _parameter(
        field.name, kind | None if _typer_default(field) is None else kind, info, _typer_default(field)
    )


def _parameter(name: str, kind: Any, info: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=Annotated[kind, info]
    )


def _declarations(field: Field) -> tuple[str, ...]:
    """Return the flag, its short form if it has one, and for a switch the flag that turns it off."""
    if field.plain_type is not bool or field.option.one_way:
        return (field.option.short, field.flag) if field.option.short else (field.flag,)
    return (f"{field.flag}/--no-{field.flag.removeprefix('--')}",)


def _bound(field: Field, bound: float | None) -> float | None:
    return int(bound) if bound is not None and field.plain_type is int else bound


def _typer_default(field: Field) -> Any:
    """Return the default as typer has it; an ellipsis where there is none."""
    if field.default is msgspec.NODEFAULT:
        return ...
    if field.plain_type is bool:
        return field.default is not field.option.negative
    if field.option.repeat or field.default is None:
        return None
    if field.option.parse or field.plain_type is None:
        return field.texts(field.default)[0]
    return field.default


def _from_typer(field: Field, typed: Any) -> Any:
    """Convert a value from typer to one that `from_values` takes; None for an option that was not given."""
    if field.plain_type is bool:
        return typed is not field.option.negative
    return str(typed) if isinstance(typed, Path) else typed or None if field.option.repeat else typed
