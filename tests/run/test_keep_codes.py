"""A quantized source keeps its codes: through the whole pipeline, to an artifact that answers as its weights do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch

from infer import Plan, Predictor, fidelity, optimize
from infer.compress.assign import choose_formats
from infer.errors import GateError, NotUsableError
from infer.load import load
from infer.results import LayerError
from infer.run.resolve_plan import keep_codes, resolve
from tests.support import tiny_decoders
from tests.support.gguf_files import CODEBOOKS, write_gguf

QUANT = gguf.GGMLQuantizationType
TYPES = {
    "v_proj.weight": QUANT.Q8_0,
    "gate_proj.weight": QUANT.Q4_1,
    "norm.weight": QUANT.F32,
    "": QUANT.Q4_0,
}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    model: Any = tiny_decoders.build("llama")
    kept = write_gguf(path, model, "llama", types=TYPES)
    model.load_state_dict(kept, strict=False)
    return path, model


def test_a_refusal_of_exact_codes_does_not_blame_the_weights(
    source: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = [LayerError("model", "LlamaModel", 1e-7), LayerError("lm_head", "Linear", 0.0)]
    monkeypatch.setattr(fidelity, "worst_layers", lambda *_: exact)
    plan = Plan(source=str(source[0]), backend="eager", data="random", allow_slower=True, max_error=1e-9)
    with pytest.raises(GateError, match="the weights are those of the source: what differs is the rounding"):
        optimize(plan, tmp_path / "m.infer")


def test_a_gguf_file_runs_on_its_own_codes(source: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = source
    plan = Plan(source=str(path), backend="eager", data="random", allow_slower=True, max_error=0.05)
    done = optimize(plan, tmp_path / "m.infer")
    assert done.report.plan.quant == "keep"
    found = {
        finding.what: finding.why
        for finding in done.report.findings
        if finding.what[:2] == "Q4" or "Q8" in finding.what
    }
    carried = {f"{kind} carried over": "exactly" for kind in ("Q4_0", "Q4_1", "Q8_0")}
    assert found.items() >= carried.items()
    assert "rows of 96 columns are no multiple of 64" in found["Q4_0 converted"]
    prompt = [3, 5, 60, 70, 80]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    with Predictor.load(tmp_path / "m.infer") as predictor:
        answer = predictor.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_codes_of_codebooks_run_as_they_are(backend: str, tmp_path: Path) -> None:
    sizes = {**tiny_decoders.GROUPED, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model: Any = tiny_decoders.build("llama", sizes=sizes)
    kept = write_gguf(tmp_path / "m.gguf", model, "llama", types=CODEBOOKS)
    model.load_state_dict(kept, strict=False)
    plan = Plan(
        source=str(tmp_path / "m.gguf"), backend=backend, data="random", allow_slower=True, batches=(1,)
    )
    done = optimize(plan, tmp_path / "m.infer")
    found = {finding.what: finding.why for finding in done.report.findings}
    for kind in set(CODEBOOKS.values()) - {QUANT.F32}:
        assert found[f"{kind.name} carried over"] == "exactly"
    prompt = [3, 5, 60, 70, 80]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].log_softmax(0)
    with Predictor.load(tmp_path / "m.infer") as predictor:
        answer = predictor.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True, logprobs=5)
    (first,) = answer.logprobs or []
    assert first.logprob == pytest.approx(float(logits[answer.token_ids[0]]), abs=0.05)


@pytest.mark.parametrize(
    ("asked", "backend", "value"),
    [("none", "auto", "keep"), ("float", "auto", "none"), ("int8", "auto", "int8"), ("none", "ort", "none")],
)
def test_codes_are_kept_unless_a_format_or_backend_says_otherwise(
    source: tuple[Path, Any], asked: str, backend: str, value: str
) -> None:
    plan = Plan(source=str(source[0]), quant=asked, backend=backend, data="random")
    stored_as = load(plan.with_(quant="none")).stored_as
    assert stored_as.startswith("Q4_0")
    run = keep_codes(resolve(plan), stored_as)
    assert run.plan.quant == value
    if asked == "none":
        assert "the source" in next(choice.reason for choice in run.choices if choice.what == "quant")


@pytest.mark.parametrize(("quant", "timed"), [("keep", []), ("nf4", ["layer"])])
def test_layers_that_carry_codes_are_not_timed_as_another_format(
    quant: str, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(choose_formats, "drop_slow", lambda assignment, free: found.extend(free))
    plan = Plan(source="m.gguf", quant=quant, batches=(1,))
    model = torch.nn.Linear(4, 4)
    asked: Any = SimpleNamespace(
        plan=plan,
        model=model,
        calibration_set=SimpleNamespace(model=model),
        budgeted=False,
        decisions={},
        free=lambda: ["layer"],
    )
    choose_formats.decide(asked)
    assert found == timed


def test_experts_of_gpt_oss_run_on_their_mxfp4_codes(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {**tiny_decoders.SIZES["gpt_oss"], "intermediate_size": 64}
    model: Any = tiny_decoders.build("gpt_oss", sizes=sizes)
    rng, held = torch.Generator().manual_seed(0), {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            held[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape  # transposed in the file
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=rng).to(torch.uint8)
        scales = torch.randint(120, 123, blocks.shape[:3], generator=rng).to(torch.uint8)
        tensor.copy_(convert_moe_packed_tensors(blocks, scales))
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder = tmp_path / "m"
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    plan = Plan(source=str(folder), backend="eager", data="random", allow_slower=True, max_error=0.05)
    done = optimize(plan, tmp_path / "m.infer")
    assert done.report.plan.quant == "keep"
    (found,) = [finding for finding in done.report.findings if finding.what.startswith("mxfp4")]
    assert (found.what, found.value, found.why) == ("mxfp4 carried over", 4, "exactly")
    prompt = [3, 5, 60, 70, 80]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    with Predictor.load(tmp_path / "m.infer") as predictor:
        answer = predictor.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def test_keep_of_a_float_source_names_the_missing_codes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_decoders.build("llama"), "llama")
    plan = Plan(
        source=str(tmp_path / "m.gguf"), quant="keep", backend="eager", data="random", allow_slower=True
    )
    with pytest.raises(NotUsableError, match="the source stores it in float"):
        optimize(plan, tmp_path / "m.infer")
