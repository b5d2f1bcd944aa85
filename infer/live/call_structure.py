"""Structure of a call: its tensors by name, and around them the nesting and the constants that make one variant.

Nesting is what `torch.utils._pytree` knows (tuples, dicts, named tuples, and what transformers and diffusers register
there), and dataclasses, which it knows only once somebody registers them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UsageError
from ..spec import DTYPE_NAMES, keyword

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, enum.Enum)


class UnsupportedValueError(UsageError):
    """A value in the arguments or the result of a call that is neither a tensor nor a constant."""


class _TensorPlace:
    """Mark of a tensor among the leaves of a structure."""

    def __repr__(self) -> str:
        return "tensor"


TENSOR = _TensorPlace()


class _Fields(dict[str, Any]):
    """Fields of a dataclass or items of a mapping, as a node that pytree can flatten; `made` is its class."""

    made: type


def _flatten_fields(fields: _Fields) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(fields.values()), (fields.made, tuple(fields))


def _flatten_fields_with_keys(fields: _Fields) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    return [(pytree.GetAttrKey(key), value) for key, value in fields.items()], (fields.made, tuple(fields))


def _make_instance(values: Sequence[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    made, names = context
    items = dict(zip(names, values, strict=True))
    if issubclass(made, Mapping):  # the outputs of diffusers are both
        return made(**items) if dataclasses.is_dataclass(made) else made(items)  # type: ignore[call-arg]
    instance: Any = object.__new__(made)  # of a frozen class too, and without running __post_init__ again
    for name, value in items.items():
        object.__setattr__(instance, name, value)
    return instance


@functools.cache
def _register_fields() -> None:
    pytree.register_pytree_node(
        _Fields,
        _flatten_fields,
        _make_instance,  # type: ignore[arg-type]
        serialized_type_name="infer.live.call_structure._Fields",
        flatten_with_keys_fn=_flatten_fields_with_keys,
    )


def _is_unknown(value: Any) -> bool:
    """Return true for a dataclass instance or a mapping of which pytree does not know the names of its parts."""
    known = pytree.SUPPORTED_NODES.get(type(value))
    has_names = known is not None and known.flatten_with_keys_fn is not None
    return not has_names and (dataclasses.is_dataclass(type(value)) or isinstance(value, Mapping))


def _opened(value: Any) -> Any:
    """Replace dataclass instances and mappings that pytree does not know by their fields and items."""
    if _is_unknown(value):
        _register_fields()
        items = value if isinstance(value, Mapping) else _fields_of(value)
        fields = _Fields({str(name): _opened(item) for name, item in items.items()})
        fields.made = type(value)
        return fields
    if type(value) in pytree.SUPPORTED_NODES:
        return pytree.tree_map(
            lambda leaf: _opened(leaf) if _is_unknown(leaf) else leaf, value, is_leaf=_is_unknown
        )
    return value


def _fields_of(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


@dataclass(frozen=True)
class Structure:
    """Nesting and constants of a value whose tensors were taken out; `names` are theirs, in order."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # constants, `TENSOR` in the place of each tensor
    names: tuple[str, ...]

    @functools.cached_property
    def key(self) -> Hashable:
        """Value that is equal for equal structures: 1, 1.0 and True are three constants."""
        return str(self.spec), tuple((type(leaf), leaf) for leaf in self.leaves), self.names

    @property
    def constants(self) -> list[Any]:
        """Values that are no tensors, in order."""
        return [leaf for leaf in self.leaves if leaf is not TENSOR]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value with these tensors in their places."""
        if self.leaves == (TENSOR,) and self.spec.is_leaf():
            return tensors[0]
        remaining = iter(tensors)
        return pytree.tree_unflatten(
            [next(remaining) if leaf is TENSOR else leaf for leaf in self.leaves], self.spec
        )


def take_apart(value: Any, what: str, *, root: str = "output") -> tuple[Structure, list[Tensor]]:
    """Return the structure of a value, and its tensors in order.

    `what` names the value in the error, `root` is the name of a tensor that is the whole value. Raises
    `UnsupportedValueError` for a leaf that is neither a tensor nor a constant.
    """
    paths, spec = pytree.tree_flatten_with_path(_opened(value))
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    names: list[str] = []
    for path, leaf in paths:
        place = ".".join(_step(key) for key in path)
        if isinstance(leaf, Tensor):
            if leaf.dtype not in DTYPE_NAMES or leaf.layout is not torch.strided:
                kind = str(leaf.dtype if leaf.dtype not in DTYPE_NAMES else leaf.layout).removeprefix(
                    "torch."
                )
                raise UnsupportedValueError(f"{what} {place or root} is a tensor of {kind}", where=place)
            leaves.append(TENSOR)
            tensors.append(leaf)
            names.append(_unique(place or root, names, alone=not path))
        elif isinstance(leaf, CONSTANTS):
            leaves.append(leaf)
        else:
            raise UnsupportedValueError(
                f"{what} {place or root} is of type {type(leaf).__name__}: neither a tensor, a number nor a text",
                where=place,
            )
    return Structure(spec, tuple(leaves), tuple(names)), tensors


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _unique(place: str, taken: Sequence[str], *, alone: bool) -> str:
    """Return a name that is a Python identifier: `features.0` becomes `features_0`, of a tuple `output_0`."""
    name = keyword(place if alone or not place[0].isdigit() else f"output_{place}")
    while name in taken:
        name += "_"
    return name


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors of a value, in order, whatever else is in it."""
    return [leaf for leaf in pytree.tree_leaves(_opened(value)) if isinstance(leaf, Tensor)]


def copied(value: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Copy the containers of a value, its tensors by `of_tensor`; any other object in it is shared."""
    leaves, spec = pytree.tree_flatten(_opened(value))
    own = [of_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(own, spec)


class CallReader:
    """Arguments of calls of a module's `forward`, as structure and tensors by the names of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._signature = inspect.signature(module.forward)
        parameters = self._signature.parameters.values()
        self._defaults = {p.name: p.default for p in parameters if isinstance(p.default, CONSTANTS)}
        self.takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.by_name = {p.name: p.default for p in parameters if p.kind in by_name}  # with their defaults

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Structure, list[Tensor]]:
        """Return structure and tensors of a call; a constant that is the parameter's default is as if not given.

        Raises `TypeError` where `forward` does not take such arguments, and `UnsupportedValueError`.
        """
        bound = self._signature.bind(*args, **kwargs)
        arguments = {
            name: value for name, value in bound.arguments.items() if not self._is_default(name, value)
        }
        return take_apart(arguments, "argument")

    def arguments(
        self, structure: Structure, tensors: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the named arguments of a call with these tensors."""
        bound = inspect.BoundArguments(self._signature, structure.filled(tensors))
        bound.apply_defaults()  # a parameter that was left out would end `args`
        return bound.args, bound.kwargs

    def _is_default(self, name: str, value: Any) -> bool:
        if name not in self._defaults or not isinstance(value, CONSTANTS):
            return False
        default = self._defaults[name]
        return type(value) is type(default) and value == default
