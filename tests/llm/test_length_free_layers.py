"""Whole sequences through rewritten layers: transformers' logits at any batch and length, captured once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infer import families
from infer.graph import capture
from infer.llm.step.length_free_layers import use_whole_sequences
from infer.load.heads.text import Decoder
from infer.spec import TensorSpec
from tests.support.tiny_decoders import SIZES, VOCABULARY, build
from tests.support.tiny_hybrids import STATEFUL

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
OWN_CODE = ("bloom", "codegen", "doge", "falcon", "falcon (alibi)", "falcon (new decoder)", "gpt_neo", "gptj")
OWN_CODE += ("gpt_neox_japanese", "mpt", "xglm")
STATES = ("falcon_h1", "jamba", "lfm2", "mamba", "mamba2", "qwen3_5_text", "recurrent_gemma")
# Their own code is bound to the length at capture.
BOUND = ("doge", "gpt_neo", "mpt", "mamba", "mamba2", "qwen3_5_text")


def is_rewritten(model: nn.Module) -> bool:
    known = {*families.known().attention, *families.known().mixers}
    return any(families.class_name(module) in known for module in model.modules())


def decoder(name: str) -> Decoder:
    return Decoder(build(name, sizes=SIZES.get(name) or STATEFUL[name]))


@pytest.mark.parametrize("name", OWN_CODE + STATES)
def test_rewritten_layers_give_the_logits_of_transformers(name: str) -> None:
    model = decoder(name)
    assert is_rewritten(model.model)
    ids = torch.randint(3, VOCABULARY, (2, 13))
    with torch.no_grad():
        expected = model(ids)
        with use_whole_sequences(model.model):
            torch.testing.assert_close(model(ids), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(model(ids), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", BOUND)
def test_a_graph_takes_other_lengths_than_that_of_its_capture(name: str) -> None:
    model = decoder(name)
    inputs = (TensorSpec("input_ids", "int64", ("batch", "seq")),)
    samples = {"input_ids": torch.randint(3, VOCABULARY, (2, 8))}
    with use_whole_sequences(model.model):
        graph = capture.capture(model, inputs, samples, sizes={"batch": (1, 64), "seq": (1, 256)})
    run = graph.callable()
    for shape in ((1, 1), (1, 7), (3, 21)):
        ids = torch.randint(3, VOCABULARY, shape)
        with torch.no_grad():
            torch.testing.assert_close(run(input_ids=ids)[0], model(ids), atol=2e-5, rtol=1e-4)


def test_layers_of_the_attention_interface_are_left_alone() -> None:
    assert not is_rewritten(build("llama"))
