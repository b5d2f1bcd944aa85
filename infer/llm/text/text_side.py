"""Text files of a language model: tokenizer, recommended options and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from ...errors import UsageError
from . import forms
from .chat_template import ChatTemplate
from .generation_config import GenerationConfig
from .tokenizer import LLMTokenizer
from .tool_parser import ToolParser
from .tools import Tool

THOUGHT_TOKENS = 16  # of the end of a prompt, enough for the marks of a thought


class TextSide:
    """Text files of a language model in `folder`, each read when it is first needed.

    `end_ids`: tokens that end a text, where the artifact itself names some. `tool_form`, `reasoning_form`: names of the
    forms of its output, "auto": as the chat template shows.
    """

    tool_form: str = forms.AUTO
    reasoning_form: str = forms.AUTO

    def __init__(self, folder: Path, name: str, vocab_size: int, end_ids: Sequence[int] = ()) -> None:
        self.folder, self.name, self.vocab_size, self._end_ids = folder, name, vocab_size, end_ids

    @cached_property
    def text_or_none(self) -> LLMTokenizer | None:
        path = self.folder / "tokenizer.json"
        return LLMTokenizer(path) if path.is_file() else None

    @property
    def text(self) -> LLMTokenizer:
        """Tokenizer of the artifact; raises `UsageError` when it has none."""
        if self.text_or_none is None:
            raise UsageError(f"{self.name} has no tokenizer.json", hint="Give token ids")
        return self.text_or_none

    @cached_property
    def config(self) -> GenerationConfig:
        ids = self.text_or_none.tokenizer.get_vocab(True) if self.text_or_none is not None else {}
        return GenerationConfig.open(self.folder, ids)

    @cached_property
    def template(self) -> ChatTemplate | None:
        return ChatTemplate.open(self.folder)

    @cached_property
    def forms(self) -> forms.Choice:
        """Forms in which the model writes calls and thoughts; raises `UsageError` for an unknown name."""
        sources = self.template.sources.values() if self.template is not None else ()
        return forms.choose("\n".join(sources), self.tool_form, self.reasoning_form)

    def prompt_end(self, prompt: Sequence[int]) -> str:
        """Return the end of a prompt's text, without blanks behind it."""
        end = b"".join(map(self.text.token_bytes, prompt[-THOUGHT_TOKENS:]))
        return end.decode(errors="replace").rstrip()

    def parser(self, prompt_end: str, tools: Sequence[Tool] | None) -> ToolParser | None:
        """Return a parser for one completion; None where all of it is content. `tools`: those that may be called."""
        chosen = self.forms
        if not chosen.reads(tools=tools is not None):
            return None
        return ToolParser(chosen.form, tools, separate=chosen.thought, opened=chosen.opened(prompt_end))

    def has_special_marks(self) -> bool:
        """Return True where a mark of the output without tools is a special token, which is to be left in the text."""
        return not set(self.forms.marks()).isdisjoint(self.text.special.values())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(i for i in self._end_ids or self.config.eos_ids if i < self.vocab_size)
