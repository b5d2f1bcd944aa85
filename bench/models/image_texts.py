"""Text about images in the models table: captioners and readers of documents, encoder and decoder of several families.

Columns: both graphs are captured; greedy tokens about two images equal those of transformers' `generate`; int8:weight
and nf4 pass their own gate and generate; `/predict` answers an image file with the same text.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.models.checks import Cells, ask_server, cells_of, optimized, randomize
from bench.models.image_text_configs import NAMES, QUESTION, WITH_QUESTION, build, greedy, save

TITLE = "Text about images"
COLUMNS = ("captured", "decodes", "int8:weight", "nf4", "served")
SHOWN = {
    "trocr": "TrOCR (ViT, TrOCR)", "trocr-small": "TrOCR small (DeiT, TrOCR)", "donut": "Donut (DonutSwin, mBART)",
    "vit-gpt2": "ViT, GPT-2", "swin-bert": "Swin, BERT", "beit-roberta": "BEiT, XLM-RoBERTa", "blip": "BLIP, captions",
    "blip-vqa": "BLIP, answers to questions", "florence2": "Florence-2 (DaViT, BART)",
}  # fmt: skip
ENTRIES = {SHOWN[name]: name for name in NAMES}
NEW = 16


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row, cheapest first."""
    torch.manual_seed(0)
    model: Any = build(ENTRIES[name])
    source = save(model, folder / "model")
    question = QUESTION if ENTRIES[name] in WITH_QUESTION else None
    expected = [greedy(model, torch.from_numpy(pixels)[None], NEW, question=question) for pixels in _pixels()]
    artifact = folder / "float.infer"

    def captured() -> None:
        _optimize(source, artifact, "none")

    @cache
    def trained() -> Path:
        randomize(model, trained=True)
        return save(model, folder / "trained")

    def compressed(quant: str) -> None:
        assert all(_tokens(_optimize(trained(), folder / f"{quant[:3]}.infer", quant))), "no tokens"

    others: dict[str, Callable[[], str | None]] = {
        "decodes": lambda: _decodes(artifact, expected),
        "served": lambda: _served(artifact),
        **{quant: partial(compressed, quant) for quant in ("int8:weight", "nf4")},
    }
    yield from cells_of("captured", captured, others)


def _pixels() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal((3, 32, 32)).astype(np.float32) for _ in range(2)]


def _optimize(source: Path, artifact: Path, quant: str) -> Path:
    return optimized(source, artifact, quant, task="generate", kv_dtype="float32")


def _tokens(artifact: Path) -> list[list[int]]:
    from infer import Predictor
    from infer.llm.engine.requests import Request
    from infer.llm.engine.sampling.sampling_options import Sampling
    from infer.llm.request_streams import complete

    with Predictor.load(artifact) as predictor:
        source = predictor.language_model.shape.source
        assert source is not None
        requests = [
            Request(
                id=str(index),
                prompt=QUESTION if source.reads_text else list(source.start_ids),
                sampling=Sampling(max_tokens=NEW, temperature=0.0),
                features=pixels.tobytes(),
            )
            for index, pixels in enumerate(_pixels())
        ]
        return [list(found.token_ids) for [found] in complete(predictor.engine_client, requests)]


def _decodes(artifact: Path, expected: list[list[int]]) -> None:
    assert _tokens(artifact) == expected, "other tokens than transformers' generate"


def _served(artifact: Path) -> None:
    from PIL import Image

    from infer import Predictor

    pixels = np.random.default_rng(0).integers(0, 256, (48, 60, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    with Predictor.load(artifact) as predictor:
        source = predictor.language_model.shape.source
        text = "what is it" if source is not None and source.reads_text else ""
        expected = predictor.answer((file.getvalue(), text))
    body = {"inputs": base64.b64encode(file.getvalue()).decode(), "parameters": {"text": text or None}}
    answer = ask_server(artifact, "/predict", body)
    assert answer == [expected], f"another text than that of the predictor: {answer}"
