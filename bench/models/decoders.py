"""Decoders of the models table: tiny random checkpoints made by transformers' own configurations.

Columns: the step is captured; greedy tokens equal those of transformers' `generate` (prefill, chunks of 8 tokens, then
steps, two sequences); int8:weight and nf4 pass their own gate and generate; `/v1/completions` gives the same tokens.
Weights are random for the first two, and scaled like trained ones for the formats (see `checks.randomize`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.models.checks import Cells, ask_server, cells_of, optimized, randomize
from bench.models.checks import write_byte_tokenizer as write_tokenizer
from bench.models.decoder_configs import CONFIGS

TITLE = "Decoders"
COLUMNS = ("captured", "decodes", "int8:weight", "nf4", "served")
PROMPTS = (
    [5, 90, 17, 200, 33, 64, 3, 150, 41, 250, 12, 99, 7, 180, 60, 21, 110, 9, 77, 230, 50],
    [8, 120, 31],
)
NEW, CHUNK = 24, 8


class Decoder(NamedTuple):
    """Configuration of an architecture: its name in transformers, its sizes, and the class that builds it."""

    config: str
    sizes: dict[str, Any]
    auto: str = "AutoModelForCausalLM"

    def build(self) -> nn.Module:
        import transformers

        settings = transformers.AutoConfig.for_model(self.config, **self.sizes)
        make = getattr(transformers, self.auto)
        made: nn.Module = make.from_config(settings, dtype=torch.float32)
        return made.eval()


ENTRIES: dict[str, Decoder] = {name: Decoder(*given) for name, given in CONFIGS.items()}


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row, cheapest first."""
    torch.manual_seed(0)
    model = ENTRIES[name].build()
    sources = {
        trained: _saved(model, folder / f"trained-{trained}", trained=trained) for trained in (True, False)
    }
    expected = greedy(model)
    artifact = folder / "float.infer"

    def captured() -> None:
        _optimize(sources[False], artifact, "none")

    def compressed(quant: str) -> None:
        small = _optimize(sources[True], folder / f"{quant[:3]}.infer", quant)
        assert all(len(row) == NEW for row in _tokens(small, 512)), "completions of another length"

    others: dict[str, Callable[[], str | None]] = {
        "decodes": lambda: decodes(artifact, expected),
        **{quant: partial(compressed, quant) for quant in ("int8:weight", "nf4")},
        "served": lambda: _served(artifact, sources[False], expected),
    }
    yield from cells_of("captured", captured, others)


def _saved(model: Any, folder: Path, *, trained: bool) -> Path:
    randomize(model, trained=trained)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def greedy(model: Any) -> list[list[int]]:
    """Return greedy continuations of PROMPTS by transformers, each prompt alone."""
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, use_cache=True
            )
        begun = 1 if model.config.is_encoder_decoder else len(prompt)
        found.append(out[0, begun:].tolist())
    return found


def _optimize(source: Path, artifact: Path, quant: str) -> Path:
    return optimized(source, artifact, quant, task="generate", kv_dtype="float32")


def decodes(artifact: Path, expected: list[list[int]]) -> None:
    """Compare greedy tokens of an artifact with those expected, in steps of two sizes; raises `AssertionError`."""
    for tokens in (512, CHUNK):
        got = _tokens(artifact, tokens)
        for prompt, wanted, found in zip(PROMPTS, expected, got, strict=True):
            same = next(
                (i for i, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]), NEW
            )
            assert found == wanted, (
                f"token {same} of {NEW} after {len(prompt)} tokens differs from transformers, "
                f"at most {tokens} tokens a step"
            )


def _tokens(artifact: Path, step: int) -> list[list[int]]:
    from infer import Predictor

    with Predictor.load(artifact, max_tokens_per_step=step) as predictor:
        done = predictor.generate(list(PROMPTS), max_tokens=NEW, temperature=0, ignore_eos=True)
        return [list(completion.token_ids) for completion in done]


def _served(artifact: Path, source: Path, expected: list[list[int]]) -> None:
    body = {"model": "float", "prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answer = ask_server(artifact, "/v1/completions", body)
    usage = answer["usage"]
    assert usage["completion_tokens"] == NEW, f"{usage} for {NEW} tokens"
    from tokenizers import Tokenizer

    wanted = Tokenizer.from_file(str(source / "tokenizer.json")).decode(expected[0])
    assert answer["choices"][0]["text"] == wanted, "another text than that of transformers' tokens"
