"""Language model as training uses it: the model of transformers, its tokenizer and its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from .. import compress
from ..errors import NotUsableError, UsageError
from ..llm.text.chat_template import ChatTemplate
from ..llm.text.tokenizer import LLMTokenizer
from ..load import LoadedModel, fill, load
from ..load.heads.text import Decoder
from ..plan import Plan
from ..reporter import Reporter
from .memory.frozen_layers import pass_gradients

LENGTH = 1024  # tokens of a row


@dataclass
class TrainableLanguageModel:
    """A language model of transformers and the text files beside it."""

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


def language_model_of(loaded: LoadedModel, source: str) -> TrainableLanguageModel:
    """Return the language model in a loaded source, with frozen weights.

    Raises `NotUsableError` for a model of another task, `UsageError` for one without tokenizer.
    """
    if not isinstance(loaded.module, Decoder):
        raise NotUsableError(f"text trains language models; this is a model of {loaded.task}")
    if "tokenizer.json" not in loaded.files:
        raise UsageError("the model has no tokenizer.json, so it takes no text", where=source)
    tokenizer = LLMTokenizer(loaded.files["tokenizer.json"])
    end = loaded.meta.get("eos_id")
    return TrainableLanguageModel(
        loaded,
        loaded.module.model.requires_grad_(False),
        tokenizer,
        ChatTemplate.open(Path(loaded.files["tokenizer.json"]).parent),
        end[0] if isinstance(end, list) and end else end if isinstance(end, int) else None,
        int(loaded.meta.get("vocab_size") or tokenizer.vocab_size),
        loaded.meta.get("max_length"),
    )


def open_base(source: str, format: str, reporter: Reporter) -> TrainableLanguageModel:
    """Load a language model, pack its weights as `format` says ("none" keeps float32), and freeze it.

    Raises `NotUsableError` for a model that is no decoder of text, or whose packed layers pass no gradient.
    """
    plan = Plan(source=source, quant=format, data="random")
    reporter.step("load", source)
    loaded = load(plan)
    base = language_model_of(loaded, source)
    if format != "none" and loaded.module is not None:
        reporter.step("compress", format)
        made = compress.quantize_model(
            loaded.module,
            plan,
            checkpoint=loaded.checkpoint,
            renames=loaded.renames,
            progress=reporter.progress,
        )
        reporter.found(made.findings()[-5:])
    fill(loaded)
    base.model.requires_grad_(False)
    if format != "none":
        pass_gradients(base.model)
    return base
