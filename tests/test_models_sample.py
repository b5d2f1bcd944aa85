"""The sample of models: drawn by its seed, unknown to the models table, shrunk, and its outcomes in words."""

from __future__ import annotations

import pytest

from bench.models import sample, sample_configs
from bench.models.checks import BROKEN, NONE, REFUSED, WORKS, Cell
from bench.models.head_configs import ENTRIES
from bench.models.sample_transformers import with_sizes


def test_a_seed_draws_the_same_models_and_none_of_the_table() -> None:
    found = sample_configs.draw(3, 40)
    assert found == sample_configs.draw(3, 40) != sample_configs.draw(4, 40)
    assert len({one.model_type for one in found}) == 40
    assert not {one.model_type for one in found} & {entry.config for entry in ENTRIES.values()}


@pytest.mark.parametrize("name", ["xlm:XLMForTokenClassification", "chinese_clip:ChineseCLIPModel"])
def test_a_default_configuration_is_shrunk_to_a_tiny_model(name: str) -> None:
    model = sample_configs.build(sample_configs.named(name))
    assert 1e4 < sum(parameter.numel() for parameter in model.parameters()) < 5e6


@pytest.mark.parametrize(
    ("cells", "outcome"),
    [
        ({"opens": Cell(WORKS), "int8": Cell(WORKS)}, "works"),
        ({"opens": Cell(REFUSED), "int8": Cell(NONE)}, "refused"),
        ({"opens": Cell(WORKS), "int8": Cell(REFUSED)}, "float works, int8 refused"),
        ({"opens": Cell(WORKS), "equals the original": Cell(BROKEN, "wrong: 1 of 3 differ")}, "wrong"),
        ({"opens": Cell(BROKEN, "KeyError at x.py:3")}, "crash"),
        ({"opens": Cell(NONE, "not made: ValueError"), "int8": Cell(NONE)}, "not made"),
    ],
)
def test_the_outcome_of_a_row_is_its_worst(cells: dict[str, Cell], outcome: str) -> None:
    assert sample.verdict(cells) == outcome


def test_inputs_that_a_refusal_names_get_sizes() -> None:
    said = (
        "Name them: --input 'pixel_values=float32[batch,3,height,width]' --input 'input_ids=int64[batch,seq]'"
    )
    assert with_sizes(said) == ("pixel_values=float32[batch,3,64,64]", "input_ids=int64[batch,seq]")
