"""Input specs of a model: from the source, from --input, or proposed from its first layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..errors import UsageError
from ..plan import Plan
from ..spec import BATCH, Finding, TensorSpec
from .samples import sample_files

LENGTHS = ("seq", "time", "length", "tokens")
EXAMPLE = "Example: --input x=float32[batch,3,224,224]"
_SPATIAL: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Conv1d, "length"),
    (nn.Conv2d, "height,width"),
    (nn.Conv3d, "depth,height,width"),
)
COLOURS, SIDE = 3, 64  # channels and pixels of an image that is tried
_OPAQUE = (nn.LSTM, nn.GRU, nn.RNN, nn.Transformer)


def asked_inputs(plan: Plan) -> dict[str, TensorSpec]:
    """Return the inputs of `--input` by name; raise `UsageError` for one that is given twice."""
    asked: dict[str, TensorSpec] = {}
    for spec in map(TensorSpec.parse, plan.inputs):
        if spec.name in asked:
            raise UsageError(
                f"input {spec.name!r} is given twice", where="--input", hint="Give each input once"
            )
        asked[spec.name] = spec
    return asked


def resolve_inputs(
    plan: Plan, known: tuple[TensorSpec, ...], module: nn.Module | None, names: tuple[str, ...] = ()
) -> tuple[tuple[TensorSpec, ...], list[Finding]]:
    """Return the input specs: `--input` before `known`, before the arrays of `--data`, before a guess from the layers.

    `names`: those of the inputs, where `module` does not tell them. Raises `UsageError` where nothing determines them.
    """
    asked = asked_inputs(plan)
    if known:
        merged = {spec.name: spec for spec in known} | asked
        return tuple(merged.values()), []
    if asked:
        return tuple(asked.values()), []
    guess, why = propose_input(module) if module is not None else (None, "nothing tells the model's inputs")
    required, optional = (names, ()) if module is None else _arguments(module)
    specs = sample_files.specs_of(plan.data, required, optional)
    if guess is not None and (not specs or (len(specs) == 1 and _fits(guess, specs[0]))):
        specs = (guess,)  # of the same sizes, and symbolic ones among them
    elif specs:
        why = f"from the array in {plan.data}"
    else:
        example = EXAMPLE if module is None else f"Example: {_options(module)}"
        raise UsageError(f"the inputs of the model are not known: {why}", where="--input", hint=example)
    return specs, [
        Finding("load", "input proposed", spec.format(), why=f"{why}; --input overrides it") for spec in specs
    ]


def _fits(guess: TensorSpec, array: TensorSpec) -> bool:
    """Tell whether an array has the sizes of a guess; its rows are not compared."""
    pairs = zip(guess.shape[1:], array.shape[1:], strict=False)
    return len(guess.shape) == len(array.shape) and all(isinstance(w, str) or w == h for w, h in pairs)


def _arguments(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the arguments of `forward` that have to be given, and of those that may be."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters if p.kind in kinds]
    required = tuple(p.name for p in named if p.default is inspect.Parameter.empty)
    return required, tuple(p.name for p in named if p.default is not inspect.Parameter.empty)


def _options(module: nn.Module) -> str:
    """Write `--input` for each argument that forward requires, with the sizes that its first layer takes."""
    for layer in module.modules():
        if (shape := _taken(layer)) is not None:
            break
    dtype, sizes = shape or ("float32", ("batch", 3, 224, 224))
    specs = (TensorSpec(name, dtype, sizes) for name in _arguments(module)[0] or ["x"])
    return " ".join(f"--input {spec.format()}" for spec in specs)


def _taken(layer: nn.Module) -> tuple[str, tuple[int | str, ...]] | None:
    """Return dtype and sizes of what a layer takes; None where it does not tell."""
    if isinstance(layer, nn.Linear):
        return "float32", ("batch", layer.in_features)
    if isinstance(layer, nn.Embedding):
        return "int64", ("batch", "seq")
    if isinstance(layer, nn.RNNBase):
        return "float32", ("batch", "time", layer.input_size)
    if isinstance(layer, _ConvNd):
        dims = next((dims for kind, dims in _SPATIAL if isinstance(layer, kind)), None)
        return None if dims is None else ("float32", ("batch", layer.in_channels, *dims.split(",")))
    return None


def propose_input(module: nn.Module) -> tuple[TensorSpec | None, str]:
    """Guess the spec from `forward`'s one required argument and the first layer; or None and the reason."""
    required, _ = _arguments(module)
    if len(required) != 1:
        return None, f"its forward takes {', '.join(required) or 'no named argument'}"
    name = required[0]
    for path, layer in module.named_modules():
        if isinstance(layer, _OPAQUE):
            break
        reason = f"from its first layer {path or type(layer).__name__} ({type(layer).__name__})"
        if (taken := _taken(layer)) is not None:
            dtype, (rows, *sizes) = taken
            if isinstance(layer, nn.Conv2d) and sizes[0] == 1 and _takes_colour(module):
                sizes[0], reason = (
                    COLOURS,
                    f"{reason}; images of {COLOURS} channels run too, of which it makes one",
                )
            return TensorSpec(name, dtype, (rows, *sizes)), reason
        if any(True for _ in layer.parameters(recurse=False)):
            break
    return None, f"the size of {name!r} can't be seen from its layers"


def _takes_colour(module: nn.Module) -> bool:
    """Try a model whose first convolution takes one channel on an image of three, of which it may take the mean."""
    first = next(iter(module.parameters()))
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            module(torch.zeros(1, COLOURS, SIDE, SIDE, dtype=first.dtype, device=first.device))
    except Exception:  # noqa: BLE001 - whatever it raises, it does not take such an image
        return False
    finally:
        module.train(training)
    return True


def bounds(specs: Iterable[TensorSpec], plan: Plan) -> dict[str, tuple[int, int]]:
    """Return (min, max) of the symbolic sizes that the plan bounds: the batch, a first size of all inputs, lengths."""
    listed = tuple(specs)
    first = {spec.shape[0] if spec.shape else 0 for spec in listed}
    rows = {BATCH} | {size for size in first if isinstance(size, str) and len(first) == 1}
    sizes = {size for spec in listed for size in spec.shape}
    by_size = dict.fromkeys(LENGTHS, (1, plan.max_length)) | dict.fromkeys(rows, (1, plan.max_batch))
    return {name: limits for name, limits in by_size.items() if name in sizes}
