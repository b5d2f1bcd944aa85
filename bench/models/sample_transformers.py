"""Models of transformers that nobody chose: a folder of each with random weights, opened, compared and shrunk to int8.

Columns: the folder opens with its task (and after how many seconds); the outputs equal those of transformers at float,
greedy tokens for a model that generates; `--quant int8` passes its gate. Sizes are tiny, all on plain torch.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.models.checks import NONE, WORKS, Cell, Cells, attempt, write_byte_tokenizer
from bench.models.decoders import NEW, PROMPTS, decodes, greedy
from bench.models.heads import compare
from bench.models.sample_configs import VOCABULARY, Drawn, build, named

TITLE = "Models of transformers"
COLUMNS = ("opens", "equals the original", "int8")
ENTRIES: dict[str, Drawn] = {}  # rows are named by the sample
INPUT = re.compile(r"--input '?(\w+=\w+\[[^\]]*\])")
SIZES = {"height": 64, "width": 64, "frames": 64, "bands": 80, "size": 8}
GENERATES = re.compile("(CausalLM|LMHeadModel|ConditionalGeneration|MTModel)$")


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row, `MODEL_TYPE:CLASS`."""
    drawn, source = named(name), folder / "model"
    try:
        model: Any = build(drawn)
        model.save_pretrained(source)
    except Exception as error:  # noqa: BLE001 - the sample's own sizes do not fit: no word about `infer`
        yield "opens", Cell(NONE, f"not made: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return
    extras = [text for text in (_tokenizer(source, model), _processor(source, drawn.model_type)) if text]
    begun, artifact, task = time.monotonic(), folder / "float.infer", list[str]()
    made = attempt(lambda: task.append(_optimize(source, artifact, "none", model)))  # type: ignore[func-returns-value]
    seconds = f"{time.monotonic() - begun:.0f} s"
    yield (
        "opens",
        Cell(made.outcome, ", ".join([*task, seconds, *extras]) if task else f"{made.why} [{seconds}]"),
    )
    if made.outcome != WORKS:
        return
    yield "equals the original", attempt(lambda: _equals(model, artifact))
    yield "int8", attempt(lambda: _int8(source, folder / "int8.infer", model))


def _tokenizer(source: Path, model: Any) -> str:
    text = getattr(model.config, "text_config", model.config)
    if (getattr(text, "vocab_size", None) or 0) != VOCABULARY:
        return ""
    write_byte_tokenizer(source)
    return "tokenizer"


def _processor(source: Path, model_type: str) -> str:
    """Save the processor of images or sounds that transformers has for a model type, with its default settings."""
    import transformers
    from transformers.models.auto import feature_extraction_auto, image_processing_auto

    images = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or ()
    images = images.values() if isinstance(images, dict) else images
    sounds = feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type)
    for name in filter(None, [*reversed(list(images)), sounds]):
        try:
            getattr(transformers, name)().save_pretrained(source)
        except Exception:  # noqa: BLE001, S112 - needs a package or settings: the next one
            continue
        return str(name)
    return ""


def _optimize(source: Path, artifact: Path, quant: str, model: Any) -> str:
    from infer import Plan, optimize
    from infer.artifact import store
    from infer.errors import InferError

    plan = Plan(
        source=str(source), backend="eager", quant=quant, data="random", batches=(), max_length=32, allow_slower=True,
        **({"kv_dtype": "float32"} if GENERATES.search(type(model).__name__) else {}),
    )  # fmt: skip
    try:
        optimize(plan, artifact)
    except InferError as error:  # the way out that it names: inputs, here of sizes of our own
        given = with_sizes(str(error))
        if not given:
            raise
        optimize(msgspec.structs.replace(plan, inputs=given, kv_dtype=Plan(source="").kv_dtype), artifact)
    return store.read_manifest(artifact).task


def with_sizes(refusal: str) -> tuple[str, ...]:
    """Return the inputs that a refusal names for `--input`, with sizes where it has names."""

    def number(found: re.Match[str]) -> str:
        return str(SIZES.get(found[0], found[0]))

    return tuple(re.sub(r"[a-z]+(?=[,\]])", number, text) for text in INPUT.findall(refusal))


def _equals(model: Any, artifact: Path) -> str:
    from infer.artifact import store

    if store.read_manifest(artifact).task == "text-generation" and hasattr(model, "generate"):
        decodes(artifact, greedy(model))
        return f"{NEW} tokens after {len(PROMPTS)} prompts"
    compare(model, artifact)
    return ""


def _int8(source: Path, artifact: Path, model: Any) -> None:
    torch.manual_seed(0)
    _optimize(source, artifact, "int8", model)
