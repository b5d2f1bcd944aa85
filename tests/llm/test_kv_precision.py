"""The dtype of the KV cache that a plan gets, and by whose limits it is judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from infer.errors import GateError
from infer.fidelity.thresholds import coarser_cache, precision
from infer.llm.step.step_shape import StepShape
from infer.plan import Plan
from infer.results import Metric
from infer.run.resolve_plan import Resolved, resolve, resolve_cache
from infer.run.select import enforce
from infer.run.trial import Trial
from infer.run.try_backends import Compressed

SHAPE = StepShape(layers=1, query_heads=2, kv_heads=1, head_dim=16, vocab_size=8, max_positions=64)


def resolved(**options: object) -> Resolved:
    plan = Plan(source="model", device="cpu", **options)  # type: ignore[arg-type]
    return resolve_cache(resolve(plan), "text-generation")


@pytest.mark.parametrize(
    ("options", "kv_dtype", "judged_by"),
    [
        ({}, "float32", "float32"),
        ({"dtype": "float16"}, "float16", "float16"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"quant": "int8"}, "float16", "int8"),
        ({"quant": "nf4"}, "float16", "4bit"),
        ({"max_drop": 0.01}, "float16", "3bit"),
        ({"kv_dtype": "float16"}, "float16", "float16"),
        ({"kv_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"kv_dtype": "int8", "quant": "nf4"}, "int8", "4bit"),
        ({"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn", "int8"),
    ],
)
def test_a_float_plan_keeps_exact_keys_and_values(
    options: dict[str, object], kv_dtype: str, judged_by: str
) -> None:
    run = resolved(**options)
    assert (run.plan.kv_dtype, precision(run.plan)) == (kv_dtype, judged_by)
    asked = [c.asked for c in run.choices if c.what == "kv_dtype"]
    assert asked == ([] if "kv_dtype" in options else ["auto"])


def refusal(plan: Plan, shape: StepShape | None) -> GateError:
    """Return the fidelity gate's verdict on a trial whose logits are far off."""
    far = [Metric("logits", "relative_error", 0.9), Metric("logits", "rows", 64)]
    trial = Trial(
        "eager", Path(), far, {}, size=0, reads=0, changed=False, task="text-generation", shape=shape
    )
    selected = SimpleNamespace(trial=trial, others=())
    with pytest.raises(GateError) as raised:
        enforce(plan, selected, SimpleNamespace(loaded=SimpleNamespace(module=None)), Compressed(None, None))  # type: ignore[arg-type]
    return raised.value


def test_a_refusal_names_the_kv_cache_where_it_causes_the_error() -> None:
    coarse = Plan(source="model", dtype="float32", kv_dtype="float16")
    assert coarser_cache(coarse)
    said = refusal(coarse, SHAPE)
    assert "the KV cache is float16, coarser than the weights" in str(said)
    assert "--kv-dtype fp32" in str(said.hint)
    exact = refusal(coarse.with_(kv_dtype="float32"), SHAPE)
    assert "KV cache" not in str(exact)
    assert "--kv-dtype" not in str(exact.hint)
