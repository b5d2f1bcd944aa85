"""Static scan of a pickle for the globals it would call, without unpickling it, and stand-ins for those that are inert.

Training tools save their arguments, paths, dates and random states with the weights. Their types are in no list of
torch's weights-only loader, so that it refuses the whole file. Here a closed list of their names is given to that
loader, each with a class of this file in place of the type that the name means: nothing of NumPy, pathlib, OmegaConf or
Lightning is imported or called, and what the stand-ins are given is dropped. Every other name stays refused.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

from ..errors import SourceError

MAX_PICKLE = 256 << 20
_STRINGS = {
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "UNICODE",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
}
_MEMO_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_MEMO_GET = {"GET", "BINGET", "LONG_BINGET"}
_EXTENSIONS = {"EXT1", "EXT2", "EXT4"}


def globals_of(file: IO[bytes], where: str, pickles: int = 1) -> list[str]:
    """List every `module.name` that the next `pickles` pickles in `file` refer to, in order, each once.

    Reads opcodes only. A name computed on the pickle's stack, which `torch.save` never does, is "(computed)".
    """
    names: dict[str, None] = {}
    for _ in range(pickles):
        _scan(file, where, names)
    return list(names)


def _scan(file: IO[bytes], where: str, names: dict[str, None]) -> None:
    recent: list[str] = []
    memo: dict[int, str] = {}
    last: str | None = None
    try:
        for op, argument, _ in pickletools.genops(file):
            if op.name in ("GLOBAL", "INST"):
                names[str(argument).replace(" ", ".", 1)] = None
            elif op.name == "STACK_GLOBAL":
                names[".".join(recent[-2:]) if len(recent) > 1 else "(computed)"] = None
            elif op.name in _EXTENSIONS:
                names[f"(copyreg extension {argument})"] = None
            if op.name == "MEMOIZE" or op.name in _MEMO_PUT:
                memo[len(memo) if argument is None else int(argument)] = last or ""
                continue
            last = _text(op.name, argument, memo)
            if last is not None:
                recent = [*recent[-1:], last]
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"the pickle can't be parsed: {error}",
            where=where,
            hint="The file is damaged: save or copy it again",
        ) from error


def _text(name: str, argument: object, memo: dict[int, str]) -> str | None:
    if name in _STRINGS and isinstance(argument, str):
        return argument
    if name in _MEMO_GET and isinstance(argument, int | str):
        return memo.get(int(argument))
    return None


def code_among(names: Iterable[str]) -> list[str]:
    """List the globals that torch's weights-only loader does not allow and that are no inert types."""
    from torch import _weights_only_unpickler

    allowed = {*_weights_only_unpickler._get_allowed_globals(), *INERT_TYPES}
    allowed |= {f"{item.__module__}.{item.__qualname__}" for item in _user_allowed()}
    return [name for name in names if in_python_3(name) not in allowed]


def _user_allowed() -> list[type]:
    return [item for item in torch.serialization.get_safe_globals() if isinstance(item, type)]


class InertObject:
    """Empty object in place of one of a listed type; takes any arguments and any state, and keeps neither."""

    __slots__ = ()

    def __new__(cls, *_: Any, **__: Any) -> InertObject:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class InertMapping:
    """Constructor in place of a subclass of dict: makes an `OrderedDict`, which the loader then fills."""

    def __new__(cls, *_: Any, **__: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


class InertList:
    """Constructor in place of `collections.deque`: makes a list, which the loader then fills."""

    def __new__(cls, *_: Any, **__: Any) -> list[Any]:  # type: ignore[misc]
        return []


_NUMPY_SCALARS = """bool bool_ int8 int16 int32 int64 intc uint8 uint16 uint32 uint64 float16 float32 float64 complex64
complex128 str_ bytes_ dtype ndarray"""
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
_OBJECTS: dict[str, str] = {  # module → names in it
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "typing": "Any List Dict Tuple Union Optional",
    "builtins": "list dict tuple int float str bool bytes object frozenset slice range",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "datetime": "datetime date time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "numpy": _NUMPY_SCALARS,
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.dtypes": """BoolDType Int8DType Int16DType Int32DType Int64DType UInt8DType UInt16DType UInt32DType
    UInt64DType Float16DType Float32DType Float64DType""",
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.nodes": "AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode PathNode",
    "pytorch_lightning.callbacks.model_checkpoint": "ModelCheckpoint",
    "pytorch_lightning.callbacks.early_stopping": "EarlyStopping",
    "mmengine.logging.history_buffer": "HistoryBuffer",
}
_MAPPINGS: dict[str, str] = {
    "collections": "defaultdict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "lightning.fabric.utilities.data": "AttributeDict",
    "easydict": "EasyDict",
    "addict.addict": "Dict",
    "munch": "Munch DefaultMunch",
    "yacs.config": "CfgNode",
    "fvcore.common.config": "CfgNode",
    "detectron2.config.config": "CfgNode",
    "ml_collections.config_dict.config_dict": "ConfigDict",
    "mmengine.config.config": "ConfigDict",
}


def _listed(table: dict[str, str], stand_in: type) -> dict[str, type]:
    return {f"{module}.{name}": stand_in for module, names in table.items() for name in names.split()}


INERT_TYPES: dict[str, type] = {
    **_listed(_OBJECTS, InertObject),
    **_listed(_MAPPINGS, InertMapping),
    "collections.deque": InertList,
}  # full name in a pickle → what takes its place


def inert_among(names: Iterable[str]) -> list[str]:
    """List the globals of a pickle that are read as stand-ins."""
    return [name for name in names if in_python_3(name) in INERT_TYPES]


def in_python_3(name: str) -> str:
    """Return the name that a global of Python 2 has now: pickles of protocol 2 use the old ones."""
    return "builtins.range" if name == "__builtin__.xrange" else name.replace("__builtin__.", "builtins.", 1)


@contextmanager
def inert_types_allowed() -> Iterator[None]:
    """Register inert stand-in types for the listed names in torch's weights-only loader."""
    with torch.serialization.safe_globals([(stand_in, name) for name, stand_in in INERT_TYPES.items()]):
        yield
