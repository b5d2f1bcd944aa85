"""Backends of torch.compile asked for by name: each is one of ours, or refused with the reason and the one to use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch._dynamo

from infer import Plan, plugins
from infer.cli import main
from infer.errors import UsageError
from infer.refused_backends import REPLACEMENTS
from infer.run.resolve_plan import resolve

COOKBOOK = Path(__file__).resolve().parents[2] / "docs/cookbook.md"
OF_TORCHS_OWN_TESTS = ("TESTING_ONLY", "minifier")


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_known_foreign_backend_is_refused_with_a_replacement(name: str) -> None:
    reason, other = REPLACEMENTS[name]
    assert other in plugins.names("backends")
    assert name not in plugins.names("backends")
    with pytest.raises(UsageError, match=f"no backend named '{name}': ") as error:
        resolve(Plan(source="x", backend=name))
    assert reason in str(error.value)
    assert f"Use --backend {other}" in str(error.value)


def test_every_torch_compile_backend_is_known_or_refused() -> None:
    registered = set(torch._dynamo.list_backends(exclude_tags=())) - {
        "infer"
    }  # our own, where it is installed
    known = {*REPLACEMENTS, *plugins.names("backends")}
    assert [n for n in registered if n not in known and not any(w in n for w in OF_TORCHS_OWN_TESTS)] == []


def test_every_backend_of_torchs_pages_since_2_0_is_known_or_refused() -> None:
    """The tables of torch.compile's documentation, which still show names that torch no longer registers."""
    pages = (
        "eager aot_eager inductor nvfuser aot_nvfuser aot_cudagraphs ofi fx2trt onnxrt ipex nvprims_nvfuser "
        "aot_ts_nvfuser cudagraphs torchxla_trace_once torchxla tvm tensorrt openvino openxla"
    )
    known = {*REPLACEMENTS, *plugins.names("backends")}
    assert [name for name in pages.split() if name not in known] == []


def test_the_cookbook_lists_every_name_with_its_replacement() -> None:
    lines = COOKBOOK.read_text().splitlines()
    for name, (reason, other) in REPLACEMENTS.items():
        assert any(f"`{name}`" in line and f"| {reason} | `--backend {other}` |" in line for line in lines), (
            name
        )


def test_a_refused_backend_name_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "model.pt", "--backend", "ipex"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Intel Extension for PyTorch has ended; its kernels are in torch and OpenVINO" in said
    assert "--backend openvino" in said


def test_a_backend_that_is_not_installed_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from infer.onnx import packages

    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "openvino" else object())
    assert plugins.why_not("backends", "openvino") == (
        "openvino is not installed (pip install 'infer-engine[openvino]')"
    )


def test_openvino_is_hidden_from_tests_that_do_not_ask_for_it() -> None:
    assert plugins.why_not("backends", "openvino") == (
        "openvino is not installed (pip install 'infer-engine[openvino]')"
    )


@pytest.mark.openvino
def test_openvino_is_seen_by_tests_that_ask_for_it() -> None:
    from importlib.util import find_spec

    assert (plugins.why_not("backends", "openvino") is None) == (find_spec("openvino") is not None)
