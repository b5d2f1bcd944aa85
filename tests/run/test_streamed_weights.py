"""A float model whose weights are streamed from disk is judged, and published like one in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infer import Plan, Predictor
from infer.artifact import store
from infer.run import stages

MODELS = Path(__file__).resolve().parents[2] / "models"
DIGITS = {"source": str(MODELS / "digits.pt"), "model": f"{MODELS / 'digits.py'}:build"}


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_model_with_streamed_weights_gives_the_answers_of_one_in_memory(tmp_path: Path, quant: str) -> None:
    plan = Plan(**DIGITS, load="offload", backend="eager", device="cpu", quant=quant, batches=())
    made = stages.optimize(plan, tmp_path / "digits.infer")
    judged = {row.metric: row.value for row in made.report.fidelity if row.subject == "logits"}
    assert judged["top1"] > 0.99
    images = np.load(MODELS / "digits_samples.npz")["held_out_images"][:8, None].astype(np.float32)
    with Predictor.load(tmp_path / "digits.infer") as predictor:
        answers = predictor.predict({"image": images})["logits"]
    stages.optimize(plan.with_(load="meta"), tmp_path / "resident.infer")
    with Predictor.load(tmp_path / "resident.infer") as predictor:
        resident = predictor.predict({"image": images})["logits"]
    error = np.linalg.norm(answers - resident) / np.linalg.norm(resident)
    assert error < (1e-5 if quant == "none" else 0.02)  # norms in front of streamed layers are not folded


def test_a_language_model_with_streamed_weights_becomes_a_step(tmp_path: Path) -> None:
    plan = Plan(
        source=str(MODELS / "pydoc_lm"),
        load="offload",
        backend="eager",
        device="cpu",
        quant="nf4",
        batches=(),
    )
    made = stages.optimize(plan, tmp_path / "lm.infer")
    assert made.report.decodes
    assert {"prefill", "schedules"} & {row.subject for row in made.report.fidelity}
    assert store.read_manifest(tmp_path / "lm.infer").task == "text-generation"
