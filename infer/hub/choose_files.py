"""Files of a repository that one source needs: never two formats of the same weights.

Safetensors come before pickles, both before GGUF, that before ONNX, that before an OpenVINO IR. With the weights come
the small files that say what they are: configuration, tokenizer, chat template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..errors import SourceError, UsageError, unknown
from .names import PREFIX, HubName

SIDE_FILES = (".json", ".txt", ".model", ".jinja")
SAMPLES = "samples.npz"
ARTIFACT = ("manifest.json", "manifest.sig")
MODULE_FOLDER = re.compile(r"\d+_\w+")  # of sentence-transformers: 1_Pooling, 2_Dense
STEMS = ("model", "diffusion_pytorch_model")  # of safetensors
PICKLE_STEMS = ("pytorch_model", "diffusion_pytorch_model")
# Other forms of weights that lie beside them: of half precision, of Mistral's own names, of adapters.
VARIANTS = re.compile(r"\.(fp16|bf16|fp32|ema|non_ema)[.-]|^consolidated|^adapter_model|^training_args")
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".pt2", ".bin", ".npz")
EXPORTED = ("model", "openvino_model")  # stems of the whole model in float, as Optimum names it
EXPORTS = ("onnx", "openvino")  # folders of such files; what describes them lies beside the folder
QUANTIZED = re.compile(r"(?i)(?<![a-z0-9])(I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32)(?=[.-])")
BESIDE_GGUF = re.compile(r"(?i)^(mmproj|.*imatrix)")
PREFERRED = (
    "Q4_K_M",
    "Q4_K_S",
    "Q4_0",
    "Q5_K_M",
    "Q8_0",
    "BF16",
    "F16",
    "F32",
)  # llama.cpp's own default first
SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Choice:
    """Files to download, and the one that is opened, "" for the folder of all; `why`: of several that would do."""

    files: tuple[str, ...]
    opens: str = ""
    why: str = ""
    is_artifact: bool = False


def choose(name: HubName, held: Collection[str]) -> Choice:
    """Choose among the files of a repository what `name` needs.

    Raises `SourceError` where nothing in it can be opened, `UsageError` for a variant that it does not have.
    """
    if name.inner and name.inner in held:
        return _one_file(name.inner, held)
    folder = f"{name.inner}/" if name.inner else ""
    inside = {path.removeprefix(folder) for path in held if path.startswith(folder)}
    if not inside:
        raise _absent(name, held)
    return _within(folder, _choose_inside(name, inside))


def _choose_inside(name: HubName, inside: Collection[str]) -> Choice:
    if name.variant:
        return _gguf(name, inside)
    if set(ARTIFACT) <= set(inside):
        return Choice(tuple(sorted(inside)), is_artifact=True)
    if "model_index.json" in inside:
        raise _pipeline(name, inside)
    folders = ["", *sorted({path.split("/")[0] + "/" for path in inside if _is_module(path)})]
    weights = [path for folder in folders for path in _weights(folder, inside)]
    if weights and any(f"{folder}config.json" in inside for folder in folders):
        return Choice((*weights, *_side_files(folders, inside, weights)))
    if place := _artifact_beside(inside):  # what `save_pretrained` of an artifact wrote
        return Choice(tuple(sorted(inside)), place, is_artifact=True)
    if any(path.endswith(".gguf") for path in inside):
        return _gguf(name, inside)
    if exported := [path for path in inside if path.endswith(".onnx")] or _irs(inside):
        return _exported(name, exported, inside)
    return _checkpoint(name, inside)


def _artifact_beside(inside: Collection[str]) -> str:
    """Return the one folder in a repository that is an artifact, "" where there is none."""
    parents = {path.rpartition("/")[0] for path in inside}
    found = [parent for parent in parents if {f"{parent}/{file}" for file in ARTIFACT} <= set(inside)]
    return found[0] if len(found) == 1 else ""


def _is_module(path: str) -> bool:
    first, *rest = path.split("/")
    return bool(rest) and MODULE_FOLDER.fullmatch(first) is not None


def _weights(folder: str, inside: Collection[str]) -> list[str]:
    """List the weights that lie in a folder itself: those of its index, else the usual file, else all of one format."""
    here = {path.removeprefix(folder) for path in inside if path.startswith(folder)}
    here = {path for path in here if "/" not in path}
    for stems, suffix in ((STEMS, ".safetensors"), (PICKLE_STEMS, ".bin")):
        for stem in stems:
            index = f"{stem}{suffix}.index.json"
            if index in here:
                shards = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}{re.escape(suffix)}")
                return sorted(folder + path for path in here if path == index or shards.fullmatch(path))
            if f"{stem}{suffix}" in here:
                return [f"{folder}{stem}{suffix}"]
        if suffix == ".safetensors":
            others = sorted(path for path in here if path.endswith(suffix))
            if plain := [path for path in others if not VARIANTS.search(path)] or others[:1]:
                return [folder + path for path in plain]
    return []


def _side_files(folders: Iterable[str], inside: Collection[str], weights: Collection[str]) -> list[str]:
    """List configuration, tokenizer and templates; of the indices of shards only that of the weights."""
    found = []
    for path in sorted(inside):
        parent, _, file = path.rpartition("/")
        here = f"{parent}/" if parent else ""
        beside = here in folders or parent == "additional_chat_templates"
        wanted = file.endswith(SIDE_FILES) or file == SAMPLES
        if beside and wanted and not file.endswith(".index.json") and path not in weights:
            found.append(path)
    return found


def _gguf(name: HubName, inside: Collection[str]) -> Choice:
    """Choose one model among GGUF files, by its quantization; all its parts where it is split."""
    models: dict[str, list[str]] = {}  # path without suffix and number of its part → files
    for path in sorted(inside):
        stem = path.removesuffix(".gguf")
        if stem != path and not BESIDE_GGUF.match(PurePosixPath(path).name):
            models.setdefault(SHARD.sub("", stem), []).append(path)
    labels: dict[str, list[str]] = {}
    for stem in sorted(models, key=lambda stem: (len(stem), stem)):
        found = QUANTIZED.findall(f"{PurePosixPath(stem).name}.")
        labels.setdefault(found[-1].upper() if found else PurePosixPath(stem).name, models[stem])
    if not labels:
        raise SourceError("the repository has no GGUF file of a model", where=str(name))
    if name.variant and name.variant.upper() not in labels:
        raise unknown("quantization", name.variant, sorted(labels))
    wanted = (name.variant.upper(), *PREFERRED, *labels)
    label = next(label for label in wanted if label in labels)
    others = sorted(other for other in labels if other != label)
    why = f"{label}, of {len(labels)} quantizations; another by {name.repo}:{others[-1]}" if others else ""
    return Choice(tuple(labels[label]), labels[label][0], "" if name.variant else why)


def _irs(inside: Collection[str]) -> list[str]:
    """List the OpenVINO IRs: graphs that have their weights beside them; tokenizers are none."""
    return [
        path
        for path in inside
        if path.endswith(".xml")
        and path.removesuffix("xml") + "bin" in inside
        and not path.endswith("tokenizer.xml")
    ]


def _exported(name: HubName, models: Collection[str], inside: Collection[str]) -> Choice:
    """Choose the one file of an exporter, or the whole float model of several; with what belongs to it."""
    usual = [path for path in models if PurePosixPath(path).stem in EXPORTED]
    if len(models) > 1 and len(usual) != 1:
        raise _several(name, models)
    path = usual[0] if usual else next(iter(models))
    others = len(models) - 1
    kind = "ONNX files" if path.endswith(".onnx") else "OpenVINO IRs"
    why = f"one of {others + 1} {kind}; another by {PREFIX}{name.repo}/FILE" if others else ""
    return Choice(_with_companions(path, inside), path, why)


def _with_companions(path: str, inside: Collection[str]) -> tuple[str, ...]:
    """Return the file of an exporter with its data, and the files that describe it.

    Data: model.onnx_data, model.onnx.data, model.onnx_data_1, model.data; of an IR the .bin.
    """
    stem, _, suffix = path.rpartition(".")
    data = re.compile(rf"{re.escape(path)}[._]data(_\d+)?|{re.escape(stem)}\.data")
    found = {
        other for other in inside if data.fullmatch(other) or (suffix == "xml" and other == f"{stem}.bin")
    }
    folder = PurePosixPath(path).parent
    beside = folder.parent if folder.name in EXPORTS else folder
    described = "" if str(beside) == "." else f"{beside}/"
    return (path, *sorted(found), *_side_files([described], inside, found))


def _one_file(path: str, held: Collection[str]) -> Choice:
    if path.endswith(".onnx") or path in _irs(held):
        return Choice(_with_companions(path, held), path)
    stem, _, suffix = path.rpartition(".")
    if suffix == "gguf" and SHARD.search(stem):
        whole = SHARD.sub("", stem)
        return Choice(tuple(sorted(p for p in held if SHARD.sub("", p.removesuffix(".gguf")) == whole)), path)
    return Choice((path,), path)


def _checkpoint(name: HubName, inside: Collection[str]) -> Choice:
    """Choose the one checkpoint of a repository without config.json."""
    found = sorted(path for path in inside if path.endswith((*CHECKPOINTS, ".safetensors")))
    found = [path for path in found if not VARIANTS.search(PurePosixPath(path).name)] or found
    if len(found) > 1:
        raise _several(name, found)
    if found:
        return Choice((found[0],), found[0])
    raise SourceError(
        f"the repository has no weights in a format that is opened here; it holds {_some(inside)}",
        where=str(name),
        hint="Known: safetensors, pytorch_model.bin, GGUF, ONNX, OpenVINO IR, .pt",
    )


def _within(folder: str, chosen: Choice) -> Choice:
    files = tuple(folder + path for path in chosen.files)
    opens = folder + chosen.opens if chosen.opens else folder.rstrip("/")
    return Choice(files, opens, chosen.why, chosen.is_artifact)


def _pipeline(name: HubName, inside: Collection[str]) -> SourceError:
    parts = sorted(
        {path.split("/")[0] for path in inside if path.endswith("/config.json") and path.count("/") == 1}
    )
    return SourceError(
        "the repository is a diffusers pipeline of several models",
        where=str(name),
        hint=f"Optimize one of them: {', '.join(f'{PREFIX}{name.repo}/{part}' for part in parts)}",
    )


def _several(name: HubName, found: Collection[str]) -> UsageError:
    first = min(found)
    return UsageError(
        f"the repository has {len(found)} models: {_some(found)}",
        where=str(name),
        hint=f"Name one: {PREFIX}{name.repo}/{first}",
    )


def _absent(name: HubName, held: Collection[str]) -> SourceError:
    return SourceError(
        f"the repository has no file or folder {name.inner!r}; it holds {_some(held)}", where=str(name)
    )


def _some(paths: Collection[str]) -> str:
    listed = sorted(paths, key=lambda path: (path.count("/"), path))
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") or "nothing"
