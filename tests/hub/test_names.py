"""Names of the Hub: forms, what this machine has comes first, and the files that a source of each kind needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.errors import InferError, SourceError, UsageError
from infer.hub import HubName, choose_files, named


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/model-7b", HubName("org/model-7b")),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("org/model@v1.0", HubName("org/model", "v1.0")),
        ("org/model@refs/pr/3", HubName("org/model", "refs/pr/3")),
        ("org/model:Q8_0@main", HubName("org/model", "main", "Q8_0")),
        ("hf:gpt2", HubName("gpt2")),
        ("hf://org/model", HubName("org/model")),
        ("hf:org/model.v2", HubName("org/model.v2")),
        ("hf:org/model/sub/file.gguf", HubName("org/model", inner="sub/file.gguf")),
        ("hf:org/model@refs/pr/3/file.gguf", HubName("org/model", "refs/pr/3", inner="file.gguf")),
        ("gpt2", None),
        ("./org/model", None),
        ("/org/model", None),
        ("folder/model.onnx", None),
        ("folder/net.py:build", None),
        ("timm:resnet18", None),
        ("a/b/c", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(text: str, name: HubName | None) -> None:
    assert named(text) == name
    if name is not None:
        assert named(str(name)) == name


def test_what_this_machine_has_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert named("org/model") is None
    assert named("hf:org/model") == HubName("org/model")


@pytest.mark.parametrize("text", ["hf:", "hf:/", "hf:org/model/../secret", "hf:a b/c"])
def test_a_malformed_name_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="hf:ORG/NAME"):
        named(text)


SIDE = ["config.json", "tokenizer.json", "chat_template.jinja"]
CASES: dict[str, tuple[str, list[str], list[str], str]] = {  # name, files held, files chosen, the one opened
    "safetensors before others": (
        "o/m",
        [*SIDE, "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "README.md", "a.png"],
        [*SIDE, "model.safetensors"],
        "",
    ),
    "shards with their index": (
        "o/m",
        [
            *("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            *("model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin.index.json"),
        ],
        [
            *("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            "model.safetensors.index.json",
        ],
        "",
    ),
    "pickles where nothing else is": (
        "o/m",
        ["config.json", "pytorch_model.bin", "flax_model.msgpack", "training_args.bin", "vocab.txt"],
        ["config.json", "pytorch_model.bin", "vocab.txt"],
        "",
    ),
    "no variants of half precision": (
        "o/m",
        ["config.json", "model.fp16.safetensors", "model.safetensors"],
        ["config.json", "model.safetensors"],
        "",
    ),
    "modules of sentence-transformers": (
        "o/m",
        [
            *("config.json", "modules.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json"),
            *("2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "openvino/openvino_model.xml"),
        ],
        [
            *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json"),
            *("model.safetensors", "modules.json"),
        ],
        "",
    ),
    "one GGUF of several": (
        "o/m",
        ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q2_K.gguf", "mmproj-F16.gguf", "README.md"],
        ["m-Q4_K_M.gguf"],
        "m-Q4_K_M.gguf",
    ),
    "a GGUF by its quantization": ("o/m:q8_0", ["m.Q8_0.gguf", "m.Q4_K_M.gguf"], ["m.Q8_0.gguf"], "m.Q8_0.gguf"),
    "a GGUF by its quantization beside safetensors": (
        "o/m:F16",
        ["config.json", "model.safetensors", "m-f16.gguf"],
        ["m-f16.gguf"],
        "m-f16.gguf",
    ),
    "all parts of a split GGUF": (
        "o/m",
        ["Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf", "m-Q8_0.gguf"],
        ["Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf"],
        "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf",
    ),
    "one file by its path": ("hf:o/m/b.gguf", ["a.gguf", "b.gguf", "config.json"], ["b.gguf"], "b.gguf"),
    "ONNX where it is all there is": (
        "o/m",
        ["config.json", "onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model.onnx_data"],
        ["onnx/model.onnx", "onnx/model.onnx_data", "config.json"],
        "onnx/model.onnx",
    ),
    "a quantized ONNX file by its path": (
        "hf:o/m/onnx/model_int8.onnx",
        ["config.json", "onnx/model.onnx", "onnx/model_int8.onnx", "tokenizer.json", "README.md"],
        ["onnx/model_int8.onnx", "config.json", "tokenizer.json"],
        "onnx/model_int8.onnx",
    ),
    "an OpenVINO IR where it is all there is": (
        "o/m",
        ["config.json", "openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin"],
        ["openvino_model.xml", "openvino_model.bin", "config.json"],
        "openvino_model.xml",
    ),
    "a folder of a pipeline": (
        "hf:o/m/unet",
        [
            *("model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"),
            *("unet/diffusion_pytorch_model.fp16.safetensors", "vae/config.json"),
        ],
        ["unet/config.json", "unet/diffusion_pytorch_model.safetensors"],
        "unet",
    ),
    "a lone checkpoint": ("o/m", ["README.md", "weights/net.pth"], ["weights/net.pth"], "weights/net.pth"),
    "an artifact whole": (
        "o/m",
        ["manifest.json", "manifest.sig", "weights/w.safetensors", "config.json"],
        ["config.json", "manifest.json", "manifest.sig", "weights/w.safetensors"],
        "",
    ),
    "an artifact beside what another library wrote": (
        "o/m",
        ["config.json", "model.infer/manifest.json", "model.infer/manifest.sig", "model.infer/weights/w.safetensors"],
        ["config.json", "model.infer/manifest.json", "model.infer/manifest.sig", "model.infer/weights/w.safetensors"],
        "model.infer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_only_the_files_of_one_form_of_the_weights_are_chosen(case: str) -> None:
    text, held, wanted, opened = CASES[case]
    name = named(text)
    assert name is not None
    chosen = choose_files.choose(name, held)
    assert sorted(chosen.files) == sorted(wanted)
    assert chosen.opens == opened


@pytest.mark.parametrize(
    ("text", "held", "error", "says"),
    [
        ("o/m", ["README.md", "tf_model.h5"], SourceError, "no weights in a format that is opened here"),
        ("o/m", ["a.pt", "b.pt"], UsageError, "has 2 models: a.pt, b.pt.*hf:o/m/a.pt"),
        ("o/m:Q9", ["m-Q8_0.gguf"], UsageError, "no quantization named 'Q9'"),
        ("o/m:Q8_0", ["config.json", "model.safetensors"], SourceError, "no GGUF file"),
        ("hf:o/m/x.onnx", ["model.onnx"], SourceError, "no file or folder 'x.onnx'; it holds model.onnx"),
        ("o/m", ["model_index.json", "unet/config.json"], SourceError, "pipeline.*hf:o/m/unet"),
    ],
)
def test_what_can_not_be_chosen_is_said(
    text: str, held: list[str], error: type[InferError], says: str
) -> None:
    name = named(text)
    assert name is not None
    with pytest.raises(error, match=says):
        choose_files.choose(name, held)
