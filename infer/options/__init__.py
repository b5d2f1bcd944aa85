"""One definition of an option: metadata on the field of a struct, from which everything else is made.

    class Plan(msgspec.Struct):
        quant: Annotated[str, Option("format of the weights", group="Quantization")] = "none"

`fields` lists the options of a struct. `from_values` makes the struct from command line texts or from the table of a
TOML or JSON file; `command_line` and `to_toml` are the inverses. `infer.cli.options` makes the command line from the
same fields, and docs/cli.md is written from that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ..errors import UsageError, unknown

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Option:
    """Metadata of one field, in its `Annotated` type."""

    help: str  # one phrase
    _: KW_ONLY
    group: str = "Options"  # the panel of --help
    flag: str | None = None  # as typed; None: `--` and the field's name, empty: a positional argument
    short: str | None = None  # one letter that may be typed instead, `-n`
    metavar: str | None = None
    envvar: str | None = None
    minimum: float | None = None
    above: float | None = None  # exclusive minimum
    maximum: float | None = None
    repeat: bool = False  # given once for each item
    path: bool = False  # names a file or folder
    negative: bool = False  # a switch that sets False
    one_way: bool = False  # a switch without its `--no-` form
    secret: bool = False  # left out of files and of command lines that are printed
    shown_default: str | None = None  # where the field's own default says too little
    parse: Callable[[Any], Any] | None = None  # text, texts or value of a file → value; raises `UsageError`
    format: Callable[[Any], Any] | None = None  # value → text, or texts of a repeated flag


class Field(NamedTuple):
    """One option: the field's name, its type without metadata, its default (`msgspec.NODEFAULT`: required)."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The flag as typed, `--max-drop`; empty for a positional argument."""
        return f"--{self.name.replace('_', '-')}" if self.option.flag is None else self.option.flag

    @property
    def plain_type(self) -> type | None:
        """`bool`, `int`, `float` or `str` where the field is one of them, or that and None; else None."""
        kinds = [kind for kind in (get_args(self.type) or (self.type,)) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 and kinds[0] in (bool, int, float, str) else None

    def texts(self, value: Any) -> list[str]:
        """Format a value as typed on a command line; several texts for a repeated flag, NAME=VALUE for a dict."""
        written = self.option.format(value) if self.option.format else value
        if not self.option.repeat:
            return [str(written)]
        return (
            [f"{n}={v}" for n, v in written.items()]
            if isinstance(written, dict)
            else [str(item) for item in written]
        )


@cache
def fields(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    """List the options of a struct, in order; raise `TypeError` for a field without `Option` or help."""
    options = []
    hints = get_type_hints(kind, include_extras=True)
    for info in msgspec.structs.fields(kind):
        hint = hints[info.name]
        parts = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        option = next((part for part in parts[1:] if isinstance(part, Option)), None)
        if option is None or not option.help.strip():
            raise TypeError(f"{kind.__name__}.{info.name} has no Option with a help text")
        has_factory = info.default_factory is not msgspec.NODEFAULT
        default = info.default_factory() if has_factory else info.default
        options.append(Field(info.name, parts[0], default, option))
    return tuple(options)


def option_of(kind: type[msgspec.Struct], name: str, **changes: Any) -> Option:
    """Return the option of a field, for a field of another struct that means the same; `changes`: its group, say."""
    return replace(next(field.option for field in fields(kind) if field.name == name), **changes)


def from_values(kind: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Make the struct from texts of a command line or values of a file, by field name.

    Raises `UsageError` for an unknown name, a wrong type, and a number out of its bounds; `where` names the file.
    """
    known = {field.name: field for field in fields(kind)}
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown("option", name[:64], known)
        parse = known[name].option.parse
        try:
            parsed[name] = value if parse is None or value is None else parse(value)
        except (TypeError, AttributeError) as error:
            raise UsageError(f"option {name} can't be {value!r:.64}", where=where) from error
    try:
        struct = msgspec.convert(parsed, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"an option has the wrong type: {error}", where=where) from error
    for field in known.values():
        _check_bounds(field, getattr(struct, field.name), where)
    return struct


def checked(value: S) -> S:
    """Return the value with every option parsed and checked as if it came from a file; raises `UsageError`."""
    return from_values(type(value), {field.name: getattr(value, field.name) for field in fields(type(value))})


def _check_bounds(field: Field, value: Any, where: str) -> None:
    if fault := range_fault(field.option, field.flag, value):
        raise UsageError(fault, where=where)


def range_fault(option: Option, name: str, value: Any) -> str | None:
    """Describe how a number violates the option's range; None if it is within, or not a number.

    NaN is out of every range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low = option.above if option.minimum is None else option.minimum
    if low is None and option.maximum is None:
        return None
    enough = low is None or (value > low if option.minimum is None else value >= low)
    if enough and (option.maximum is None or value <= option.maximum):
        return None
    return f"expected {name} {_range_text(option)}, got {_number(value)}"


def _range_text(option: Option) -> str:
    low, above, high = option.minimum, option.above, option.maximum
    if low is not None and high is not None:
        return f"between {_number(low)} and {_number(high)}"
    if above is not None:
        return f"above {_number(above)}" + ("" if high is None else f" and at most {_number(high)}")
    return (
        f"of at most {_number(high)}"
        if low is None and high is not None
        else f"of at least {_number(low or 0)}"
    )


def _number(value: float) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def command_line(value: msgspec.Struct, *, secrets: bool = False) -> list[str]:
    """Return the command-line arguments that give this value: positional ones, then non-default options.

    Secrets are left out unless `secrets`: other users of the machine can read command lines.
    """
    words: list[str] = []
    for field in sorted(fields(type(value)), key=lambda field: field.flag != ""):
        current = getattr(value, field.name)
        if current == field.default or (field.option.secret and not secrets):
            continue
        if not field.flag:
            words += field.texts(current)
        elif field.plain_type is bool:
            words.append(field.flag if current is not field.option.negative else _off(field))
        else:
            words += [word for text in field.texts(current) for word in (field.flag, text)]
    return words


def _off(field: Field) -> str:
    """Return the flag that switches off what is on by default."""
    return f"--no-{field.flag.removeprefix('--')}"


def to_toml(value: msgspec.Struct, *, every: bool = False) -> str:
    """Write a TOML table of the options that are not the default; of `every` one, with its help as a comment."""
    lines: list[str] = []
    tables: list[str] = []
    for field in fields(type(value)):
        current = getattr(value, field.name)
        if field.option.secret or (current == field.default and not every):
            continue
        plain = _plain(current)
        comment = [f"# {field.option.help}"] if every else []
        if isinstance(plain, dict):  # tables come last, or what follows would be part of them
            tables += [
                "",
                *comment,
                f"[{field.name}]",
                *(f"{_toml(k)} = {_toml(v)}" for k, v in plain.items()),
            ]
        elif plain is None:
            lines += [*comment, f"# {field.name} ="]
        else:
            lines += [*comment, f"{field.name} = {_toml(plain)}"]
    return "\n".join([*lines, *tables]) + "\n"


def _plain(value: Any) -> Any:
    """Convert to plain JSON values; of a struct only what is not its default."""
    if isinstance(value, msgspec.Struct):
        default = type(value)()
        names = [name for name in value.__struct_fields__ if getattr(value, name) != getattr(default, name)]
        return {name: _plain(getattr(value, name)) for name in names}
    return msgspec.to_builtins(value)


def _toml(value: Any) -> str:
    """Write a TOML value: its basic strings, numbers, booleans and arrays are JSON's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
