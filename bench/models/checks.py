"""Checks shared by the rows of the models table: one cell each, refusals with their reason."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from infer.errors import InferError

LAYER_SHARE = 0.3  # of the stream, that a layer adds to it in weights that are scaled like trained ones
PEAK = 1.5  # standard deviations of the logits that lie between the best two tokens
WORKS, REFUSED, BROKEN, NONE = "works", "refused", "broken", "not tried"


class Cell(msgspec.Struct):
    """Result of one check; `why` is the reason of a refusal, or a remark on what works."""

    outcome: str
    why: str = ""


Cells = Iterator[tuple[str, Cell]]


def attempt(check: Callable[[], str | None]) -> Cell:
    """Run a check: works with the remark that it returns, refused with the error of `infer`, or broken."""
    try:
        return Cell(WORKS, check() or "")
    except InferError as error:
        return Cell(REFUSED, _sentence(str(error)))
    except AssertionError as error:
        return Cell(BROKEN, f"wrong: {_sentence(str(error))}")
    except Exception as error:  # noqa: BLE001 - a cell says what happened, the table goes on
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Cell(BROKEN, f"{type(error).__name__} at {where}: {_sentence(str(error))}")


def cells_of(
    first: str, capture: Callable[[], str | None], others: Mapping[str, Callable[[], str | None]]
) -> Cells:
    """Run the first check of a row, and the others where it works; a refusal of the model is one of every column."""
    cell = attempt(capture)
    yield first, cell
    for column, check in others.items():
        if cell.outcome == WORKS:
            yield column, attempt(check)
        else:
            yield column, Cell(REFUSED if cell.outcome == REFUSED else NONE, f"not {first}")


def optimized(source: Path, artifact: Path, quant: str, **plan: Any) -> Path:
    """Optimize a source for plain torch, with a cache as exact as its float weights, timed by none."""
    from infer import Plan, optimize

    kept = {"backend": "eager", "batches": (), "data": "random", "allow_slower": True, **plan}
    return optimize(Plan(source=str(source), quant=quant, **kept), artifact).path


def _sentence(text: str) -> str:
    """Return the first sentence, one line, without the folder of the row."""
    line = re.sub(r"/\S*/row-\w+/", "", " ".join(text.split()))
    return re.split(r"(?<=[a-z0-9)])\. (?=[A-Z])", line)[0][:300]


def randomize(model: nn.Module, *, trained: bool) -> None:
    """Fill a model with random weights.

    - `trained` false: every weight takes part, attention too; vectors (norms, biases) are moved off their constants.
    - `trained` true: as much room between the best tokens as trained models have. Embeddings are large beside what the
      layers add, and the output layer looks for the embedding of another token, so that its logits are peaked. Where
      norms stand behind the layers, random ones add several times the embedding: those embeddings grow.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                not parameter.is_floating_point() or not parameter.requires_grad
            ):  # computed tables are not stored
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (0.04 if trained else 0.08))
            else:
                parameter.add_(noise * 0.05)
        if trained:
            _peak(model, generator)
            _let_embeddings_lead(model)


def _peak(model: Any, generator: torch.Generator) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None:
        return
    weight = getattr(head, "weight", None)
    tied = weight is embedding.weight
    noise = torch.randn(embedding.weight.shape, generator=generator)
    embedding.weight.copy_(noise * (0.1 if tied else 0.2))
    if weight is not None and not tied and weight.shape == embedding.weight.shape:
        order = torch.randperm(len(weight), generator=generator)
        weight.copy_(embedding.weight[order] * 0.5)


def _let_embeddings_lead(model: Any) -> None:
    """Scale embeddings where the first layer adds more than LAYER_SHARE of them, and until logits peak."""
    embedding = model.get_input_embeddings()
    if (
        embedding is None
        or not hasattr(model, "config")
        or getattr(model.config, "is_encoder_decoder", False)
    ):
        return
    if "pixel_values" in inspect.signature(model.forward).parameters:
        return
    ids = torch.arange(3, 3 + 32)[None]
    before, after = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[:2]
    added = float((after - before).norm() / before.norm())
    if added > 1 - LAYER_SHARE:
        embedding.weight.mul_(added / LAYER_SHARE)
    for _ in range(8):  # later layers may add more
        logits = model(input_ids=ids, use_cache=False).logits
        best, second = logits.topk(2).values.unbind(-1)
        if float((best - second).mean() / logits.std()) > PEAK:
            return
        embedding.weight.mul_(2)


def ask_server(artifact: Path, path: str, body: dict[str, Any], **options: Any) -> Any:
    """Serve an artifact from this process and return the JSON answer to one request; the main thread serves."""
    from infer.serve.server import run

    answers: list[Any] = []

    def ask(url: str) -> None:
        try:
            data = json.dumps(body).encode()
            request = urllib.request.Request(url + path, data, {"content-type": "application/json"})  # noqa: S310
            with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310 - our own server
                answers.append(json.load(reply))
        except urllib.error.HTTPError as error:
            answers.append(RuntimeError(f"{error.code}: {error.read().decode()[:300]}"))
        except OSError as error:
            answers.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def started(line: str) -> None:
        if found := re.search(r"http://[\w.]+:\d+", line):
            threading.Thread(target=ask, args=(found[0],), daemon=True).start()

    with contextlib.redirect_stdout(None):
        run([artifact], say=started, port=0, **options)
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 320 tokens: padding, begin, end, one for each byte, and 61 more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"x{i}" for i in range(61))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
