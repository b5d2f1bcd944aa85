"""Attention modules of transformers that have code of their own, replaced within a step by calls of the paged operator.

Models made before transformers' attention interface compute their attention themselves. `replaced_attention` gives such
a module, found by the name of its class in `families`, another method for the time of a step: projections and positions
stay the module's own code, what mixes tokens becomes one call. Each is compared with the model's own forward by `probe`
and by `require_float_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import MethodType

from torch import nn

from .... import families

# Parts of a path to attention of the same classes that is not causal: to the output of an encoder, or in one.
NOT_CAUSAL = {"encoder_attn", "crossattention", "text_encoder"}


@contextlib.contextmanager
def replaced_attention(model: nn.Module, attend: families.Attend) -> Iterator[bool]:
    """Replace the attention modules of `model` that are known within the context; yield True where there are any."""
    known = families.known().attention
    found: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        replacement = known.get(families.class_name(module))
        if replacement is None or NOT_CAUSAL & set(path.split(".")):
            continue
        setattr(module, replacement.method, MethodType(partial(replacement.compute, attend), module))
        found.append((module, replacement.method))
    try:
        yield bool(found)
    finally:
        for module, name in found:
            delattr(module, name)
