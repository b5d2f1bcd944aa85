"""The worked examples of docs/contributing.md are plug-ins that work, each in one file of at most 60 lines."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from infer import Plan, Predictor, attention, families, load, optimize, plugins
from infer.artifact.manifest import target_of
from infer.attention import reference
from infer.compress.assign.format_order import larger_formats
from infer.errors import InferError, NotUsableError, UsageError
from infer.export import export_model
from infer.fidelity.thresholds import precision_class
from infer.llm.step.probe import probe
from infer.llm.step.schedules.schedule_consistency import require_float_step
from infer.llm.text import forms
from infer.llm.text.tool_parser import ToolParser
from infer.llm.text.tools import Tool, constrain
from tests.support.attention_cases import Case
from tests.support.decoder_folders import sentencepiece
from tests.support.fake_predictors import double, live
from tests.support.output_forms import read_all
from tests.support.page_blocks import ROOT, blocks
from tests.support.tiny_decoders import GROUPED, VOCABULARY

FILES = {block.title: block.text for block in blocks(ROOT / "docs/contributing.md") if block.title}
Install = Callable[..., ModuleType]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put an example into its plug-in folder, for this test."""
    installed: list[tuple[str, str]] = []

    def put(path: str, *, as_folder: bool = False) -> ModuleType:
        place = tmp_path / (Path(path).stem if as_folder else "")
        place.mkdir(exist_ok=True)
        (place / ("__init__.py" if as_folder else Path(path).name)).write_text(FILES[path])
        package, name = str(Path(path).parent).replace("/", "."), Path(path).stem
        folder = importlib.import_module(package)
        monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
        installed.append((package, name))
        return plugins.get(package, name)

    yield put
    for package, name in installed:
        sys.modules.pop(f"{package}.{name}", None)
        vars(importlib.import_module(package)).pop(name, None)


def test_the_page_has_an_example_of_each_kind_of_plugin() -> None:
    folders = [str(Path(path).parent).replace("/", ".") for path in FILES]
    assert sorted(folders) == sorted(plugins.KINDS)
    assert max(text.count("\n") for text in FILES.values()) <= 60


def test_the_examples_pass_the_linter(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / Path(path).name).write_text(text)
    rules = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "I001"]
    command = [sys.executable, "-m", "ruff", "check", *rules, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()


def published(tmp_path: Path, **changes: object) -> tuple[Predictor, nn.Module, np.ndarray]:
    """Make an artifact of a small module with `changes` of the plan; return it, the module and other inputs."""
    module, rows = perceptron(), torch.randn(40, 64)
    torch.save(module, tmp_path / "model.pt")
    np.savez(tmp_path / "rows.npz", input=rows[:32].numpy())
    plan = Plan(
        source=str(tmp_path / "model.pt"),
        data=str(tmp_path / "rows.npz"),
        trust_code=True,
        allow_slower=True,
        allow_partial=True,
        batches=(),
    )
    optimize(plan.with_(**changes), tmp_path / "model.infer")
    return Predictor.load(tmp_path / "model.infer"), module, rows[32:].numpy()


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_the_example_backend_makes_an_artifact_equal_to_the_model(
    install: Install, tmp_path: Path, as_folder: bool
) -> None:
    install("backends/core_aten.py", as_folder=as_folder)
    predictor, module, rows = published(tmp_path, backend="core_aten")
    with predictor, torch.no_grad():
        output = next(iter(predictor.predict({"input": rows}).values()))
        np.testing.assert_allclose(output, module(torch.from_numpy(rows)), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_the_example_format_packs_weights_into_four_bits(install: Install, tmp_path: Path) -> None:
    pow2 = install("infer/compress/formats/pow2.py")
    weight = torch.randn(16, 128)
    tensors = pow2.quantize(weight, None, Plan(source="", quant="pow2"))
    assert tensors["codes"].shape == (16, 64)
    assert (pow2.dequantize(tensors) - weight).norm() < 0.2 * weight.norm()
    assert precision_class("pow2", "float32") == "4bit"
    assert larger_formats(Plan(source="", quant="pow2:16")) == ["pow2:16", "cluster:6", "int8", "fp16"]
    predictor, module, rows = published(tmp_path, backend="eager", quant="pow2", max_error=0.3)
    with predictor, torch.no_grad():
        output = next(iter(predictor.predict({"input": rows}).values()))
        expected = module(torch.from_numpy(rows)).numpy()
        error = np.linalg.norm(output - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.3


@pytest.mark.parametrize("window", [0, 5])
def test_the_example_attention_equals_the_reference(
    install: Install, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = install("infer/attention/online.py")
    case = Case(new=(1, 3, 9), done=(40, 0, 31), window=window)
    torch.testing.assert_close(case.run(online), case.run(reference), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(attention, "_CHOSEN", {})
    args = case.args(case.cache(), case.done, case.new)
    assert [name for name, _ in attention.kernels()] == ["triton", "sdpa", "online", "reference"]
    assert attention.choose(args) == "sdpa"
    monkeypatch.setattr(online, "PRIORITY", 25)
    monkeypatch.setattr(attention, "_CHOSEN", {})
    assert attention.choose(args) == "online"


def test_a_format_without_a_class_is_judged_as_float(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    pow2 = install("infer/compress/formats/pow2.py")
    monkeypatch.delattr(pow2, "PRECISION_CLASS")
    assert precision_class("pow2", "bfloat16") == "float32"
    assert precision_class("not_installed", "float32") == "float32"
    monkeypatch.setattr(pow2, "PRECISION_CLASS", "5bit", raising=False)
    with pytest.raises(UsageError, match="expected a row of the thresholds as PRECISION_CLASS, got '5bit'"):
        precision_class("pow2", "float32")


@pytest.mark.parametrize("found", [{"torch": 2}, {1: "x"}, ["torch"], None])
def test_the_target_of_a_backend_is_a_mapping_of_strings(found: object) -> None:
    stub = SimpleNamespace(target=lambda device: {"torch": torch.__version__})
    assert type(target_of(stub, "stub", "cpu")["torch"]) is str
    stub.target = lambda device: found
    with pytest.raises(NotUsableError, match=r"expected a dict of texts from target\(\).* - at backend stub"):
        target_of(stub, "stub", "cpu")


def test_the_example_dialect_answers_and_refuses(install: Install) -> None:
    install("infer/serve/api/simple.py")
    with live(double()) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/simple/double", json={"x": [[1, 2, 3, 4]]})
        assert (answer.status_code, answer.json()) == (200, {"y": [[2.0, 4.0, 6.0, 8.0]], "rows": [0]})
        for body in ({}, {"x": [[1, 2]]}, {"x": [["a", 2, 3, 4]]}, {"x": 1}):
            assert client.post("/simple/double", json=body).status_code == 400
        assert client.post("/simple/other", json={"x": [[1, 2, 3, 4]]}).status_code == 404


@pytest.fixture
def only_families_of_now() -> Iterator[None]:
    """Look for families anew, and take what they register with transformers back."""
    from transformers.models.auto import configuration_auto, modeling_auto

    kept = [configuration_auto.CONFIG_MAPPING, modeling_auto.AutoModelForCausalLM._model_mapping]
    before = [dict(mapping._extra_content) for mapping in kept]
    known = (families.known, plugins._foreign)
    for cached in known:
        cached.cache_clear()
    yield
    for mapping, content in zip(kept, before, strict=True):
        mapping._extra_content = content
    for cached in known:
        cached.cache_clear()


def save_cosine(folder: Path) -> Any:
    """Save a tiny model of the example family, which infer opens then, and return it."""
    import transformers

    config = transformers.AutoConfig.for_model("cosine", **GROUPED)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def opens_as(model: Any, source: Path) -> nn.Module:
    """Open a source and compare its logits with those of the model that it was made from."""
    loaded = load.load(Plan(source=str(source), data="random"))
    load.fill(loaded)
    ids = torch.randint(3, VOCABULARY, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids), model(ids).logits, rtol=1e-4, atol=1e-5)
    return loaded.module.model


@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.usefixtures("only_families_of_now")
def test_the_example_family_opens_steps_and_exports_as_its_model(install: Install, tmp_path: Path) -> None:
    install("infer/families/cosine.py")
    families.known()
    model = save_cosine(tmp_path / "cosine")
    opened = opens_as(model, tmp_path / "cosine")
    shape = probe(opened)
    (error,) = require_float_step(opened, shape, torch.randint(3, VOCABULARY, (2, 24)))
    assert error.value < 1e-5
    sentencepiece(tmp_path / "cosine", VOCABULARY, prefix=True)
    export_model(str(tmp_path / "cosine"), "gguf", tmp_path / "cosine.gguf", kind="F32")
    opens_as(model, tmp_path / "cosine.gguf")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("only_families_of_now")
def test_a_package_adds_the_example_family_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").touch()
    (tmp_path / "my_package/cosine.py").write_text(FILES["infer/families/cosine.py"])
    made = tmp_path / "my_package-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[infer.families]\ncosine = my_package.cosine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cosine" in plugins.names("infer.families")
    assert "cosine" in families.known().gguf
    model = save_cosine(tmp_path / "cosine")
    probe(opens_as(model, tmp_path / "cosine"))
    for name in ("my_package", "my_package.cosine"):
        sys.modules.pop(name)


@pytest.mark.usefixtures("only_families_of_now")
def test_two_families_may_not_say_something_under_one_name(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    cosine = install("infer/families/cosine.py")
    monkeypatch.setattr(cosine, "FAMILY", families.Family(gguf={"gemma": families.GgufLayout("x", "X")}))
    with pytest.raises(InferError, match="the family gemma has 'gemma' in `gguf`, as another family has"):
        families.known()
    monkeypatch.setattr(cosine, "FAMILY", None)
    with pytest.raises(NotUsableError, match="expected `FAMILY`, a Family, in the module of cosine"):
        families.known()


def test_the_example_form_is_shown_by_a_template_and_reads_calls(install: Install) -> None:
    install("infer/llm/text/forms/nemotron.py")
    chosen = forms.choose("{# nemotron #}<TOOLCALL>[...]</TOOLCALL>")
    assert chosen.name == "nemotron"
    tools = [Tool("now", {"type": "object"})]
    text = 'Well. <TOOLCALL>[{"name": "now", "arguments": {"a": "</TOOLCALL>"}}]</TOOLCALL> x'
    content, calls = read_all(ToolParser(chosen.form, tools), text)
    assert (content, [(call.name, call.arguments) for call in calls]) == (
        "Well. x",
        [("now", '{"a": "</TOOLCALL>"}')],
    )
    assert constrain(tools, "required", chosen.form) is not None
    assert FILES["infer/llm/text/forms/nemotron.py"].count("\n") <= 40
