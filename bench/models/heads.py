"""Heads of the models table: encoders and other models with the heads that people publish.

Columns: the folder opens with its task; the outputs equal those of transformers; int8:weight and nf4 pass their gate;
the artifact is served. Models are tiny, random and scaled so that their outputs vary; inputs are random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.models.checks import Cells, ask_server, cells_of, optimized
from bench.models.head_configs import ENTRIES, tiny
from infer.artifact import store

PRETRAINING = ("ForPreTraining", "ForMaskedImageModeling")  # their heads are left out
TITLE = "Heads"
COLUMNS = ("opens", "equals transformers", "int8:weight", "nf4", "served")


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row, cheapest first."""
    torch.manual_seed(0)
    model = tiny(ENTRIES[name])
    model.save_pretrained(folder / "model")
    artifact, entry = folder / "float.infer", ENTRIES[name]

    def task_of(quant: str, artifact: Path) -> str:
        optimized(folder / "model", artifact, quant, inputs=entry.inputs, max_length=32)
        return store.read_manifest(artifact).task

    def compressed(quant: str) -> None:
        task_of(quant, folder / f"{quant[:3]}.infer")

    others: dict[str, Callable[[], str | None]] = {
        "equals transformers": lambda: compare(model, artifact),
        **{quant: partial(compressed, quant) for quant in ("int8:weight", "nf4")},
        "served": lambda: _served(artifact),
    }
    yield from cells_of("opens", lambda: task_of("none", artifact), others)


def _inputs(predictor: Any) -> dict[str, np.ndarray]:
    """Draw two rows for the inputs of an artifact: tokens, pixels or samples; the second is padded where masked."""
    generator = np.random.default_rng(0)
    sizes = {"batch": 2, "seq": 12, "samples": 4000, "images": 2, "texts": 3}
    for name, (low, high) in predictor.sizes.items():
        sizes[name] = min(max(sizes.get(name, low), low), high)
    sizes["batch"] = 2  # rows run one by one where the batch is fixed
    found = {}
    for spec in predictor.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        if spec.dtype == "float32":
            found[spec.name] = generator.standard_normal(shape).astype(np.float32)
        elif "mask" in spec.name:
            found[spec.name] = np.ones(shape, np.int64)
            found[spec.name][1, shape[1] // 2 :] = 0
        elif spec.name == "bbox":
            found[spec.name] = np.sort(generator.integers(0, 1001, (*shape[:-1], 2, 2)), -2).reshape(shape)
        else:
            found[spec.name] = (
                generator.integers(3, 64, shape) if spec.name == "input_ids" else np.zeros(shape, int)
            )
    end = (predictor.manifest.meta or {}).get("eos_id")
    # Classifiers over encoder-decoders read the state there; a tiny vocabulary may lack the token.
    if "input_ids" in found and isinstance(end, int) and end < 64:
        ids = found["input_ids"]
        ids[0, -1] = ids[1:, ids.shape[1] // 2 - 1] = end
    return found


def compare(model: Any, artifact: Path) -> None:
    """Compare the outputs of an artifact with those of transformers on random inputs; raises `AssertionError`."""
    from infer import Predictor

    with Predictor.load(artifact) as predictor, torch.no_grad():
        inputs = _inputs(predictor)
        got = predictor.predict(inputs)
        given = {name: torch.from_numpy(value) for name, value in inputs.items()}
        if type(model).__name__.endswith("ForMultipleChoice"):  # one choice a question
            given = {name: value[:, None] for name, value in given.items()}
        if model.config.model_type == "siglip":  # trained on padded texts, and reads the padding
            text, mask = model.config.text_config, given.pop("attention_mask")
            ids = given["input_ids"].where(mask != 0, text.pad_token_id)
            longer = text.max_position_embeddings - ids.shape[1]
            given["input_ids"] = torch.nn.functional.pad(ids, (0, longer), value=text.pad_token_id)
        if type(model).__name__.endswith(PRETRAINING) and "embedding" in got:
            model = model.base_model
        expected = model(**given)
        for name, value in got.items():
            theirs = _theirs(model, expected, name, given.get("attention_mask"))
            np.testing.assert_allclose(value, theirs.numpy(), rtol=1e-4, atol=1e-4)


def _theirs(model: Any, expected: Any, name: str, mask: torch.Tensor | None) -> torch.Tensor:
    """Return what transformers gives for an output of ours; `mask`: of padded texts."""
    if (classes := expected.get("class_queries_logits")) is not None:
        masks = expected.masks_queries_logits
        if model.config.model_type == "mask2former":
            masks = torch.nn.functional.interpolate(masks, (384, 384), mode="bilinear")
        return torch.einsum("bqc,bqhw->bchw", classes.softmax(-1)[..., :-1], masks.sigmoid())
    if name == "embedding" and model.main_input_name == "input_ids" and "pooler_output" not in expected:
        real = torch.ones_like(expected.last_hidden_state[..., :1]) if mask is None else mask[..., None]
        return torch.nn.functional.normalize((expected.last_hidden_state * real).sum(1) / real.sum(1))
    found = {"logits": ("logits_per_image", "prediction_logits"), "embedding": ("pooler_output",)}
    for own in (name, *found.get(name, ()), "embeddings", "audio_embeds"):
        if (value := expected.get(own)) is not None:
            return value.flatten(1) if own == "pooler_output" else value  # type: ignore[no-any-return]
    return expected.last_hidden_state.mean(1)  # type: ignore[no-any-return]


def _served(artifact: Path) -> None:
    from infer import Predictor

    with Predictor.load(artifact) as predictor:
        inputs, specs = _inputs(predictor), predictor.inputs
        expected = predictor.predict(inputs)
    tensors = [
        {
            "name": spec.name,
            "datatype": {"float32": "FP32", "int64": "INT64"}[spec.dtype],
            "shape": list(inputs[spec.name].shape),
            "data": inputs[spec.name].reshape(-1).tolist(),
        }
        for spec in specs
    ]
    answer = ask_server(artifact, f"/v2/models/{artifact.stem}/infer", {"inputs": tensors})
    for output in answer["outputs"]:
        value = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_allclose(value, expected[output["name"]], rtol=1e-4, atol=1e-4)
