"""Third-party clients against a live server: llm-comply for the protocol, lm-eval for the numbers."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer import Predictor
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import live

ROOT = Path(__file__).resolve().parents[3]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{text}}}}"
metric_list: [{metrics}]
"""


def tool(name: str) -> str:
    """Find a client's program; skips the test where it is not installed."""
    found = shutil.which(name, path=f"{ROOT / '.conformance/bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: make conformance")
    return found


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    env = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=env, check=False, timeout=500
    )
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


def test_llm_comply_passes_except_for_images(tmp_path: Path) -> None:
    program = tool("llm-comply")
    engine = FakeEngine(script="Hello there, friend.", constrained=CALL)
    with live(FakeLLMPredictor(tmp_path, engine=engine, context=4096)) as server:
        command = [
            program,
            "-u",
            f"{server.url}/v1",
            "-m",
            "fake_llm",
            "-k",
            "none",
            "--format",
            "openai-chat",
        ]
        report = json.loads(run([*command, "--json"], tmp_path))
    results: list[dict[str, Any]] = report["results"]
    failed = {one["id"]: one["errors"] for one in results if one["status"] == "failed"}
    assert set(failed) == {"chat-image-input"}
    assert "HTTP 400" in failed["chat-image-input"][0]
    assert sum(one["status"] == "passed" for one in results) >= 7
    assert not any(one.get("warnings") for one in results if one["status"] == "passed")


@pytest.fixture(scope="module")
def predictor(pydoc_artifact: Path) -> Iterator[Predictor]:
    with Predictor.load(pydoc_artifact, kv_memory="40MiB") as predictor:
        yield predictor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter has many to give
def test_lm_eval_matches_predictor_perplexity_and_greedy_text(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Texts of one window each: what lm-eval does with longer ones is its own."""
    program = tool("lm_eval")
    predictor: Predictor = request.getfixturevalue("predictor")
    text = (ROOT / "models/pydoc_lm/samples.txt").read_text()
    texts = [text[start : start + 700] for start in range(0, 6 * 700, 700)]
    starts = [predictor.language_model.encode(one[:80], special=False) for one in texts]  # as lm-eval encodes
    made = predictor.generate(starts, max_tokens=12, temperature=0, stop=["\n"])
    greedy = [one.text for one in made]
    rolling = [{"context": "", "text": one} for one in texts]
    until = [{"context": one[:80], "text": made} for one, made in zip(texts, greedy, strict=True)]
    for name, kind, rows, metrics in (
        ("rolling", "loglikelihood_rolling", rolling, "{metric: bits_per_byte}"),
        ("until", "generate_until", until, "{metric: exact_match}"),
    ):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = TASK.format(name=name, kind=kind, data=data, metrics=metrics)
        if kind == "generate_until":
            task += 'generation_kwargs: {until: ["\\n"], max_gen_toks: 12}\n'
        (tmp_path / f"{name}.yaml").write_text(task)
    begin = predictor.language_model.config.bos_id
    ids = [[begin, *predictor.language_model.encode(one, special=False)] for one in texts]
    total = sum(score.total for score in predictor.score(ids))
    expected = -total / math.log(2) / sum(len(one.encode()) for one in texts)
    with live(predictor) as server:
        options = f"model=pydoc,base_url={server.url}/v1/completions,tokenizer_backend=remote,max_length=512"
        options += f",custom_prefix_token_id={begin},num_concurrent=2"
        command = [
            program,
            "run",
            "--model",
            "local-completions",
            "--model_args",
            options,
            "--batch_size",
            "3",
        ]
        command += ["--include_path", ".", "--tasks", "rolling,until", "--output_path", "out"]
        run(command, tmp_path)
    (found,) = tmp_path.glob("out/**/results_*.json")
    results = json.loads(found.read_text())["results"]
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)
    assert results["until"]["exact_match,none"] == 1.0
