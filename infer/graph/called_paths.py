"""Paths that a module takes when its users call it, and not when it is captured.

torch's own transformer encoder packs the tokens of a padded batch when gradients are off, and gives zeros at padded
places; while it is exported it computes them. Code of a model may ask whether it is being compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def padded_encoders() -> Iterator[None]:
    """Let `nn.TransformerEncoder` give zeros at padded places, as it does where its users call it without gradients."""
    original = nn.TransformerEncoder.forward

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        packs = (
            torch.backends.mha.get_fastpath_enabled()
            and getattr(self, "use_nested_tensor", False)
            and not self.training
            and src.dim() == 3
            and mask is None
        )
        if not packs or src_key_padding_mask is None:
            return original(self, src, mask, src_key_padding_mask, is_causal)
        norm, self.norm = self.norm, None
        try:
            output = original(self, src, None, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        added = functional._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", None, "", src.dtype, check_other=False
        )
        hidden = torch.as_tensor(added).ne(0)
        if getattr(self, "mask_check", True):
            hidden = hidden & padded_at_the_end(hidden)
        output = output.masked_fill(hidden.unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    nn.TransformerEncoder.forward = forward  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = original  # type: ignore[method-assign]


def padded_at_the_end(hidden: Tensor) -> Tensor:
    """Return whether all rows of a mask, bool [batch, time], hide only what follows their last token; bool []."""
    return (hidden[:, 1:] | ~hidden[:, :-1]).all()


@contextmanager
def as_if_called(module: nn.Module) -> Iterator[None]:
    """Let the code of `module` that asks whether it is being compiled or exported hear that it is not."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    held: list[dict[str, bool]] = []

    def enter(*_: Any) -> None:
        held.append({flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)})
        for flag in held[-1]:
            setattr(torch.compiler, flag, False)

    def leave(*_: Any) -> None:
        for flag, value in held.pop().items():
            setattr(torch.compiler, flag, value)

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
