"""A language model in a worker process, with the parts of the Predictor interface that serving uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import NotUsableError, UsageError
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.generation_config import GenerationConfig
from ...llm.text.tokenizer import LLMTokenizer
from .messages import ModelInfo
from .remote_engine import RemoteEngine
from .remote_predictor import RemoteModel
from .supervisor import SupervisedWorker


class RemoteLanguageModel:
    """Counterpart of `infer.llm.llm.LanguageModel`: text files are read here, the engine is remote."""

    def __init__(self, driver: RemoteEngine, card: ModelInfo) -> None:
        self.driver, self.name = driver, card.name
        self.context, self.vocab_size, self.adapter_names = card.context, card.vocab_size, card.adapters
        self.folder = Path(card.path or ".")

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

    def check_grammar(self, constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None:
        """Compile the grammar in the worker; raise `InputError` where it can't be enforced."""
        self.driver.check_grammar(constraint, tried)


class RemoteLLM(RemoteModel):
    """Predictor of a language model in a worker.

    `language` builds its text side from engine and model information.
    """

    def __init__(
        self,
        worker: SupervisedWorker,
        card: ModelInfo,
        language: Callable[[RemoteEngine, ModelInfo], Any] | None = None,
    ) -> None:
        super().__init__([worker], card)
        if card.context <= 0:
            raise NotUsableError(f"{card.name} can't generate")
        self.driver = RemoteEngine(worker, name=card.name)
        self.language = (language or RemoteLanguageModel)(self.driver, card)

    def close(self) -> None:
        self.driver.close()
