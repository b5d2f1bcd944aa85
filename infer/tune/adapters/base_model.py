"""Frozen base of an adapter: a language model whose weights stay packed, or in float."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ... import compress
from ...errors import NotUsableError, UsageError
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.tokenizer import LLMTokenizer
from ...load import LoadedModel, fill, load
from ...load.heads.text import Decoder
from ...plan import Plan
from ...reporter import Reporter
from ..memory.frozen_layers import pass_gradients

LENGTH = 1024  # tokens of a row


@dataclass
class BaseModel:
    """A language model of transformers without a trainable parameter, and the text files beside it."""

    loaded: LoadedModel  # keeps mapped weights and temporary folders alive
    model: nn.Module
    tokenizer: LLMTokenizer
    template: ChatTemplate | None
    end: int | None  # token after a text
    vocab: int
    longest: int | None  # tokens

    def length(self, asked: int | None) -> int:
        """Return the tokens of a row; raise `UsageError` for more than the model takes."""
        if asked is not None and self.longest is not None and asked > self.longest:
            raise UsageError(f"the model takes {self.longest} tokens, not {asked}", where="--length")
        return asked or min(LENGTH, self.longest or LENGTH)


def open_base(source: str, format: str, reporter: Reporter) -> BaseModel:
    """Load a language model, pack its weights as `format` says ("none" keeps float32), and freeze it.

    Raises `NotUsableError` for a model that is no decoder of text, or whose packed layers pass no gradient.
    """
    plan = Plan(source=source, quant=format, data="random")
    reporter.step("load", source)
    loaded = load(plan)
    if not isinstance(loaded.module, Decoder):
        raise NotUsableError(f"adapters are trained of language models; this is a model of {loaded.task}")
    if "tokenizer.json" not in loaded.files:
        raise UsageError("the model has no tokenizer.json, so it takes no text", where=source)
    if format != "none":
        reporter.step("compress", format)
        made = compress.quantize_model(
            loaded.module, plan, reader=loaded.reader, renames=loaded.renames, progress=reporter.progress
        )
        reporter.found(made.findings()[-5:])
    fill(loaded)
    model = loaded.module.model.requires_grad_(False)
    if format != "none":
        pass_gradients(model)
    folder = Path(loaded.files["tokenizer.json"]).parent
    tokenizer = LLMTokenizer(loaded.files["tokenizer.json"])
    meta = loaded.meta
    end = meta.get("eos_id")
    return BaseModel(
        loaded,
        model,
        tokenizer,
        ChatTemplate.open(folder),
        end[0] if isinstance(end, list) and end else end if isinstance(end, int) else None,
        int(meta.get("vocab_size") or tokenizer.vocab_size),
        meta.get("max_length"),
    )
