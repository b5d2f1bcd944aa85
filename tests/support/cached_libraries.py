"""Results that libraries compute again for each model or server, computed once in a process of the test suite.

Each takes longer than the test's own work where the model is small, and depends on nothing that a test changes.
"""

from __future__ import annotations

import builtins
import os
import pickle
import sys
import typing
from functools import cache, wraps
from types import BuiltinFunctionType, ModuleType, SimpleNamespace
from typing import Any

# Torch's ONNX exporter parses the source of each function of torchlib to learn one string, the domain; AOTInductor
# puts all of torch's headers through the preprocessor, twice, to learn whether they have changed; httpx reads the
# certificates of all authorities for each client, and for each `httpx.get`, of http too.
FUNCTIONS = (
    ("onnxscript._internal.values", "TracedOnnxFunction", "function_ir"),
    ("torch._inductor.codecache", "", "_precompile_header"),
    ("httpx._transports.default", "", "create_ssl_context"),
)


def cache_results() -> None:
    """Cache what the imported libraries compute repeatedly; idempotent, called before each test."""
    for module, owner, name in FUNCTIONS:
        place = getattr(sys.modules.get(module), owner, None) if owner else sys.modules.get(module)
        found = getattr(place, name, None)
        slow = found.fget if isinstance(found, property) else found
        if slow is not None and not hasattr(slow, "cache_info"):
            setattr(place, name, property(cache(slow)) if isinstance(found, property) else cache(slow))
    _cache_schema_types(sys.modules.get("torch._export.serde.serialize"))
    _cache_sympy_names(sys.modules.get("sympy.parsing.sympy_parser"))
    _patch_triton_once(sys.modules.get("triton.runtime.interpreter"))


def _patch_triton_once(interpreter: ModuleType | None) -> None:
    """Put the interpreter's functions into Triton's language once, not for each kernel and each function it calls,
    and look dtypes up in one table of numpy's, not in one made for each look.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, language = interpreter._patch_lang, interpreter.tl
    if hasattr(patch, "cache_info"):
        return
    modules = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    interpreter._patch_lang = cache(lambda _: interpreter._LangPatchScope())  # restores nothing
    patch(modules)
    of_scalar, slow = dict[str, Any](), interpreter._get_np_dtype

    def numpy_dtype(kind: Any) -> Any:
        if isinstance(kind, language.pointer_type):
            return slow(kind)
        if (name := kind.scalar.name) not in of_scalar:
            of_scalar[name] = slow(kind.scalar)
        return of_scalar[name]

    interpreter._get_np_dtype = numpy_dtype


def _cache_schema_types(serialize: ModuleType | None) -> None:
    """Cache the type hints of the 50 schema classes, which torch.export.load evaluates for each node; and copy the
    schema of a program by pickle when it is saved, several times as fast as `copy.deepcopy`.
    """
    if serialize is None or isinstance(serialize.copy, SimpleNamespace):
        return
    hints = cache(lambda cls: typing.get_type_hints(cls, globalns=vars(serialize.schema)))
    serialize.typing = SimpleNamespace(**vars(typing) | {"get_type_hints": lambda cls, globalns: hints(cls)})
    serialize.copy = SimpleNamespace(
        copy=serialize.copy.copy, deepcopy=lambda value: pickle.loads(pickle.dumps(value))
    )


def _cache_sympy_names(parser: ModuleType | None) -> None:
    """Import the names of sympy once, not for each symbolic size that torch.export.load reads."""
    if parser is None or hasattr(parser.parse_expr, "__wrapped__"):
        return
    parse = parser.parse_expr
    names: dict[str, Any] = {}
    exec("from sympy import *", names)  # noqa: S102
    functions = {
        name: value for name, value in vars(builtins).items() if isinstance(value, BuiltinFunctionType)
    }
    names |= functions | {"max": names["Max"], "min": names["Min"]}

    @wraps(parse)
    def parse_with_names(text: str, local_dict: Any = None, **options: Any) -> Any:
        return parse(text, local_dict=local_dict, **{"global_dict": dict(names), **options})

    parser.parse_expr = parse_with_names
