"""The float original of a decoder is what transformers computes, whatever its attention does with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.load.heads.text import Decoder
from tests.support.tiny_decoders import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


def as_loaded(name: str) -> Any:
    """Build as a folder is opened: torch's attention where the model has it, else its own."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.partition(" ")[0], **SIZES[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_the_wrapper_gives_the_logits_of_transformers(name: str) -> None:
    model, ids = as_loaded(name), torch.randint(3, 320, (2, 20))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(Decoder(model)(ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "prepared"), [("llama", True), ("opt", False), ("gptj", False), ("gemma2", False)]
)
def test_a_mask_is_prepared_only_where_every_layer_takes_it(name: str, prepared: bool) -> None:
    assert Decoder(as_loaded(name)).own_mask is prepared
