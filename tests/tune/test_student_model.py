"""Students made of their teacher: which layers and neurons are taken, and where their weights come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infer.errors import NotUsableError, UsageError
from infer.tune.distillation.student import StudentShape, evenly, parse_shape, student_of

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def model(name: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    head = "Model" if name in ("Bert", "ViT") else "ForCausalLM"
    return getattr(transformers, name + head)(config).eval()


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("half", StudentShape(layers=0.5)),
        ("layers:3", StudentShape(layers=3)),
        ("width:0.5", StudentShape(width=0.5)),
        ("layers:2,width:0.75", StudentShape(layers=2, width=0.75)),
        ("./student", None),
        ("net.py:small", None),
    ],
)
def test_a_shape_is_parsed_and_other_words_name_a_model(text: str, shape: StudentShape | None) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["layers:x", "layers:-1", "width:0", "width:2"])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("total", "count", "picks"), [(5, 1, (0,)), (5, 2, (0, 4)), (12, 6, (0, 2, 4, 7, 9, 11))]
)
def test_layers_are_taken_evenly_with_first_and_last(total: int, count: int, picks: tuple[int, ...]) -> None:
    assert evenly(total, count) == picks


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Bert", "Phi3"])
def test_a_student_has_the_weights_of_its_teachers_layers(name: str) -> None:
    teacher = model(name, pad_token_id=0)
    student = student_of(teacher, StudentShape(layers=3)).model
    assert student.config.num_hidden_layers == 3
    given, own = teacher.state_dict(), student.state_dict()
    prefix = next(key for key in own if ".2." in key and "layer" in key).partition(".2.")[0]
    for key, value in own.items():
        source = key.replace(f"{prefix}.2.", f"{prefix}.4.").replace(f"{prefix}.1.", f"{prefix}.2.")
        assert torch.equal(value, given[source]), key


def test_lists_of_the_configuration_keep_the_layers_taken() -> None:
    kinds = [
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
    ]
    teacher = model("Qwen3", layer_types=kinds, sliding_window=8, use_sliding_window=True)
    student = student_of(teacher, StudentShape(layers=3)).model
    assert list(student.config.layer_types) == ["full_attention", "full_attention", "sliding_attention"]


def test_a_layer_without_use_is_left_out_without_an_effect() -> None:
    """A teacher whose second and fourth layers add nothing equals its half student."""
    teacher: Any = model("Llama")
    for index in (1, 3):
        for part in (teacher.model.layers[index].self_attn.o_proj, teacher.model.layers[index].mlp.down_proj):
            nn.init.zeros_(part.weight)
    student = student_of(teacher, StudentShape(layers=3)).model
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(student.eval()(ids).logits, teacher(ids).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Bert"])
def test_neurons_without_use_are_left_out_without_an_effect(name: str) -> None:
    """Neurons that nothing reads are those that a narrow student lacks; Phi-3 stores two matrices in one."""
    teacher: Any = model(name, pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    for key, module in teacher.named_modules():
        if isinstance(module, nn.Linear) and module.in_features == SIZES["intermediate_size"]:
            dead = torch.randperm(module.in_features, generator=generator)[:64]
            module.weight.data[:, dead] = 0
            assert key
    student: Any = student_of(teacher, StudentShape(width=0.7)).model
    assert student.config.intermediate_size == 128
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(student.eval()(ids)[0], teacher(ids)[0], atol=1e-5)


def test_a_student_as_large_as_its_teacher_is_refused() -> None:
    with pytest.raises(UsageError, match="is its teacher"):
        student_of(model("Llama"), StudentShape(layers=5))
    with pytest.raises(UsageError, match="the teacher has 5 layers"):
        student_of(model("Llama"), StudentShape(layers=6))


def test_a_module_without_configuration_is_refused() -> None:
    with pytest.raises(NotUsableError, match="FILE.py:FACTORY|models of transformers"):
        student_of(nn.Linear(2, 2), StudentShape(layers=1))
