"""Files and folders of other tools, written in code, and what `infer` says of each."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

Maker = Callable[[Path], None]  # writes a source to a path


def folder(*names: str) -> Maker:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"{}")

    return make


def text(content: bytes) -> Maker:
    return lambda path: path.write_bytes(content) and None


def field(number: int, content: bytes | int) -> bytes:
    """One protobuf field: a varint or bytes."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def packed(*names: str, compression: int = zipfile.ZIP_STORED) -> Maker:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as file:
            for name in names:
                file.writestr(name, "x" * 100)

    return make


NODE = field(1, field(1, b"input") + field(2, b"Placeholder"))
IR = b'<?xml version="1.0"?>\n<!-- made --><!-- by -->\n<net name="m" version="11"><layers/></net>'
FOREIGN: dict[str, tuple[Maker, str]] = {
    "html in xml": (text(b'<?xml version="1.0"?><!DOCTYPE html><html>'), r"a web page \(HTML\)"),
    "comments only": (text(b"<?xml version='1.0'?>" + b"<!---->" * 3000), "an XML file"),
    "refused download": (text(b'<?xml version="1.0"?><Error><Code>AccessDenied'), "of a file store"),
    "xml": (text(b'<?xml version="1.0"?><plist/>'), "an XML file"),
    "svg": (text(b"<svg xmlns='http://www.w3.org/2000/svg'>"), r"a picture \(SVG\)"),
    "json": (text(b'{"a": 1}'), "a JSON file"),
    "config.json": (text(b'{"model_type": "llama"}'), "configuration of a model.*the folder it lies in"),
    "index.json": (text(b'{"metadata": {}, "weight_map": {}}'), "index of a sharded checkpoint"),
    "prototxt": (text(b'name: "LeNet"\nlayer {\n'), r"a Caffe network \(prototxt\)"),
    "png": (text(b"\x89PNG\r\n\x1a\n"), r"a picture \(PNG\)"),
    "tflite": (text(b"\x1c\0\0\0TFL3" + b"\0" * 20), r"a TensorFlow Lite model \(.tflite\)"),
    "ort": (text(b"\x1c\0\0\0ORTM" + b"\0" * 20), r"an ONNX Runtime model \(.ort\).*Give the .onnx"),
    "pte": (text(b"\x1c\0\0\0ET12" + b"\0" * 20), "an ExecuTorch program"),
    "hdf5": (text(b"\x89HDF\r\n\x1a\n"), r"an HDF5 file \(Keras\)"),
    "engine": (text(b"ftrt\0\0\0\0" + bytes(range(200, 250))), "a TensorRT engine"),
    "mxnet": (text(b"\x12\x01" + b"\0" * 14 + b"\1"), "MXNet parameters"),
    "tar": (text(b"a" * 257 + b"ustar\0" + b"0" * 300), "a tar archive"),
    "joblib packed": (text(b"x\x9c" + bytes(range(200, 250))), "joblib writes such pickles"),
    "sklearn": (text(b"\x80\x04\x95\0csklearn.svm._classes\nSVC\n\xff"), "a pickled sklearn model.*ONNX"),
    "core ml": (text(field(1, 5) + field(2, b"\x0a\0") + field(500, b"\0")), "a Core ML model"),
    "saved_model.pb": (text(field(1, 1) + field(2, NODE)), "a TensorFlow SavedModel"),
    "frozen graph": (text(NODE * 3 + field(4, b"\x08\x01")), r"a TensorFlow graph \(frozen .pb\)"),
    "caffemodel": (text(field(1, b"LeNet") + field(100, b"\0")), r"a Caffe model \(.caffemodel\)"),
    "keras": (packed("metadata.json", "config.json", "model.weights.h5"), r"a Keras model \(.keras\)"),
    "mar": (packed("MAR-INF/MANIFEST.json", "m.pt", compression=zipfile.ZIP_DEFLATED), r"TorchServe.*\(.mar\)"),
    "zipped model": (packed("model.pt", compression=zipfile.ZIP_DEFLATED), "a zip that holds model.pt.*Unpack"),
    "saved model folder": (folder("saved_model.pb"), "a TensorFlow SavedModel"),
    "onnx folder": (folder("config.json", "model.onnx"), "Give the .onnx file itself"),
    "lora folder": (folder("adapter_config.json", "adapter_model.safetensors"), "a LoRA adapter.*merge_and_unload"),
    "lora folder with a config": (
        folder("adapter_config.json", "adapter_model.safetensors", "config.json"),
        "a LoRA adapter",
    ),
    "diffusers": (folder("model_index.json"), "a diffusers pipeline of several models.*Optimize one of them"),
}  # fmt: skip


def tarred(*names: str, compressed: bool = False, cut: int | None = None) -> Maker:
    def make(path: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as file:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = 700
                file.addfile(info, io.BytesIO(b"x" * 700))
        data = gzip.compress(buffer.getvalue()) if compressed else buffer.getvalue()
        path.write_bytes(data[:cut])

    return make


def deepspeed_parent(path: Path) -> None:
    (path / "global_step10").mkdir(parents=True)
    (path / "latest").write_text("global_step10")
    (path / "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")


def other_adapter(path: Path) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (path / "adapter_model.bin").write_bytes(b"")


def torch_package(path: Path) -> None:
    from torch.package import PackageExporter

    with PackageExporter(path) as exporter:
        exporter.save_text("model", "words.txt", "a b c")


NEMO = ("./model_config.yaml", "./model_weights.ckpt")
AOTI = ("m/archive_format", "m/data/aotinductor/model/x.so")
FOREIGN |= {
    "nemo": (tarred(*NEMO), r"a NeMo model \(.nemo\).*model_weights.ckpt is a state dict"),
    "nemo packed": (tarred(*NEMO, compressed=True), r"a NeMo model \(.nemo\)"),
    "tar with names": (tarred("a/b.txt"), "a tar archive that holds a/b.txt.*Unpack it first"),
    "tar.gz": (tarred("b.txt", compressed=True), "a gzip-compressed tar archive that holds b.txt"),
    "tar.gz cut": (tarred("b.txt", compressed=True, cut=60), "a gzip"),
    "old torch": (tarred("sys_info", "pickle", "tensors", "storages"), "a tar file of torch before 0.1.10"),
    "damaged gzip": (text(b"\x1f\x8b" + b"\xff" * 50), "a damaged gzip file"),
    "joblib gzip": (
        text(gzip.compress(b"\x80\x04\x95\0csklearn.svm._classes\nSVC\n")),
        "a compressed pickle of a sklearn model.*skl2onnx",
    ),
    "joblib": (text(b"\x80\x04\x95\0cjoblib.numpy_pickle\nNumpyArrayWrapper\n\xff"), "a pickle written by joblib"),
    "torch.package": (torch_package, r"an archive of torch.package.*PackageImporter.*torch.save"),
    "endless field": (text(b"\x0a" + b"\xff" * 9 + b"\x01\x92\x03"), "not a model in any format known here"),
    "aoti": (packed(*AOTI), r"an AOTInductor package \(.pt2\).*torch.export.save"),
    "flax": (text(b"\x81\xa6params\x81\xa7Dense_0\x81\xa6kernel\xc7\x10\x01" + b"\xff" * 40), "Flax weights"),
    "xgboost binary": (text(b"{L\0\0\0\0\0\0\0\x07learner{"), r"an XGBoost model \(UBJSON\)"),
    "tensorflow state": (text(b'model_checkpoint_path: "ckpt-1"\n'), "the state of a TensorFlow checkpoint.*tf2onnx"),
    "tensorflow folder": (folder("ckpt-1.index", "ckpt-1.data-00000-of-00001"), "a TensorFlow checkpoint"),
    "orbax": (folder("_CHECKPOINT_METADATA", "manifest.ocdbt"), r"a JAX checkpoint \(Orbax\).*safetensors"),
    "dcp": (folder(".metadata", "__0_0.distcp"), "a distributed checkpoint.*dcp_to_torch"),
    "deepspeed": (folder("zero_pp_rank_0_mp_rank_00_optim_states.pt"), "a DeepSpeed checkpoint.*zero_to_fp32.py"),
    "ggml": (text(b"lmgg" + b"\0" * 20), "a GGML file.*Give the Hugging Face folder"),
    "engine folder": (folder("rank0.engine", "config.json"), "a folder with a TensorRT engine"),
    "mlpackage": (folder("coremldata.bin"), "a compiled Core ML model"),
    "deepspeed parent": (deepspeed_parent, "a DeepSpeed checkpoint.*zero_to_fp32.py"),
    "other adapter": (other_adapter, "an adapter .PEFT. of another kind than LoRA"),
    "sentencepiece": (text(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02"), "a SentencePiece tokenizer.*the folder"),
    "protocol 0": (text(pickle.dumps({"weight": [1.0]}, 0)), "a pickle of protocol 0.*with torch.save"),
}  # fmt: skip
