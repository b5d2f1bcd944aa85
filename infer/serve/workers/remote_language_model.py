"""Text side of a language model whose engine is in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ...artifact.model_info import ModelInfo
from ...errors import UsageError
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.generation_config import GenerationConfig
from ...llm.text.tokenizer import LLMTokenizer
from .messages import LanguageModelInfo
from .remote_engine import RemoteEngine


class RemoteLanguageModel:
    """Counterpart of `infer.llm.llm.LanguageModel`: text files are read here, the engine is remote."""

    def __init__(self, engine_client: RemoteEngine, info: ModelInfo, facts: LanguageModelInfo) -> None:
        self.engine_client, self.name, self.folder = engine_client, info.name, Path(info.path or ".")
        self.context, self.start_tokens = facts.context, facts.start_tokens
        self.vocab_size, self.page_bytes = facts.vocab_size, facts.page_bytes
        self.adapter_names = facts.adapter_names

    @cached_property
    def text(self) -> LLMTokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{self.name} has no tokenizer.json", hint="Give token ids")
        return LLMTokenizer(path)

    @cached_property
    def config(self) -> GenerationConfig:
        return GenerationConfig.open(self.folder, self.text.tokenizer.get_vocab(True))

    @cached_property
    def template(self) -> ChatTemplate | None:
        return ChatTemplate.open(self.folder)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(i for i in self.config.eos_ids if i < self.vocab_size)

    def translated(
        self, ids: list[int], src_lang: str | None, tgt_lang: str | None
    ) -> tuple[list[int], int | None]:
        """Apply the languages of a request, as `LanguageModel.translated` does."""
        return self.text.translated(ids, src_lang, tgt_lang)

    def check_grammar(self, constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None:
        """Compile the grammar in the worker; raise `InputError` where it can't be enforced."""
        self.engine_client.check_grammar(constraint, tried)
