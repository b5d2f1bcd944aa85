"""Text encoders of diffusers pipelines: hidden states and pooled text, as the denoisers read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...spec import TensorSpec
from ..heads.build import build as build_model
from ..heads.wrappers import Headed


class ClipTextEncoder(nn.Module):
    """CLIP's text `model`: its last hidden states, those before its last layer, and the pooled or projected text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute float [batch, seq, width] twice and [batch, dim] from int64 [batch, seq]."""
        found = self.model(input_ids=input_ids, output_hidden_states=True)
        projected = getattr(found, "text_embeds", None)
        return (
            found.last_hidden_state,
            found.hidden_states[-2],
            found.pooler_output if projected is None else projected,
        )


def build_text_encoder(kind: str, folder: Path) -> nn.Module:
    """Build the text encoder of a folder on the current device."""
    import transformers

    settings: Any = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    own = getattr(transformers, kind).config_class
    settings = settings if isinstance(settings, own) else own.from_pretrained(folder, local_files_only=True)
    return build_model(getattr(transformers, kind), settings)


def wrap_text_encoder(
    kind: str, model: nn.Module
) -> tuple[nn.Module, tuple[TensorSpec, ...], tuple[str, ...]]:
    """Return the model with named tensors, its inputs and the names of its outputs."""
    ids = TensorSpec("input_ids", "int64", ("batch", "seq"))
    if kind == "T5EncoderModel":
        mask = TensorSpec("attention_mask", "int64", ("batch", "seq"))
        hidden = ("last_hidden_state",)
        return Headed(model, (ids.name, mask.name), hidden).eval(), (ids, mask), hidden
    outputs = ("last_hidden_state", "penultimate_hidden_state", "pooled")
    return ClipTextEncoder(model).eval(), (ids,), outputs
