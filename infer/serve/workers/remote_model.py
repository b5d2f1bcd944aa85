"""Models in worker processes, with the parts of the Predictor interface that serving uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...artifact.manifest import read_report
from ...errors import NotUsableError, UsageError
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.generation_config import GenerationConfig
from ...llm.text.tokenizer import LLMTokenizer, TextOrPair, Tokenizer
from .messages import ModelInfo
from .remote_engine import RemoteEngine
from .replica import Replica
from .supervisor import SupervisedWorker


class RemoteModel:
    """Attributes that a worker reported of its model; `phases` and `speeds`: see `WorkerReady`."""

    def __init__(self, workers: Sequence[SupervisedWorker], info: ModelInfo) -> None:
        self.info, self.phases = info, dict(workers[0].phases)
        self.speeds = list(workers[0].speeds)
        self.name, self.version, self.task = info.name, info.version, info.task
        self.inputs, self.outputs, self.sizes = info.inputs, info.outputs, info.sizes
        self.max_batch, self.padding, self.manifest = info.max_batch, info.padding, info.manifest
        self.joins, self.states, self.multiples = info.joins, info.states, info.multiples
        self.attention_length = info.attention_length
        self.path = None if info.path is None else Path(info.path)

    @property
    def report(self) -> dict[str, Any]:
        """The artifact's report, like `Predictor.report`."""
        return {} if self.path is None else read_report(self.path)

    def warmup(self) -> None:
        """Do nothing: workers warm up before they report readiness."""


class RemotePredictor(RemoteModel):
    """A model of tensors: `executors` run its batches; texts are tokenized in this process."""

    def __init__(self, executors: Sequence[Replica], info: ModelInfo) -> None:
        super().__init__(executors, info)
        self.executors = list(executors)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer, like `Predictor.tokenizer`."""
        if self._tokenizer is None:
            if self.path is None or not (self.path / "tokenizer.json").exists():
                raise UsageError(f"{self.name} takes tensors, not text")
            self._tokenizer = Tokenizer(
                self.path / "tokenizer.json", max_length=self.longest, pad_id=self.padding["input_ids"]
            )
        return self._tokenizer

    @property
    def longest(self) -> int:
        """Length in tokens to which texts are truncated."""
        meta = self.manifest.meta or {}
        return min(int(meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1])

    def tokenize(self, texts: Sequence[TextOrPair]) -> dict[str, np.ndarray]:
        """Return the model inputs for `texts`, like `Predictor.tokenize`."""
        return self.pad(*self.tokenizer.encode_typed(texts))

    def pad(self, rows: list[list[int]], types: list[list[int]] | None = None) -> dict[str, np.ndarray]:
        """Return the model inputs for texts of these token ids and types, padded to one length."""
        wanted = {spec.name for spec in self.inputs}
        return {name: value for name, value in self.tokenizer.pad(rows, types).items() if name in wanted}

    def close(self) -> None:
        for executor in self.executors:
            executor.close()


class RemoteLanguageModel:
    """Counterpart of `infer.llm.llm.LanguageModel`: text files are read here, the engine is remote."""

    def __init__(self, engine_client: RemoteEngine, info: ModelInfo) -> None:
        self.engine_client, self.name = engine_client, info.name
        self.context, self.vocab_size, self.adapter_names = info.context, info.vocab_size, info.adapters
        self.start_tokens, self.folder = info.start_tokens, Path(info.path or ".")

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


class RemoteLLM(RemoteModel):
    """Predictor of a language model in a worker.

    `language_model` builds its text side from engine and model information.
    """

    def __init__(
        self,
        worker: SupervisedWorker,
        info: ModelInfo,
        language_model: Callable[[RemoteEngine, ModelInfo], Any] | None = None,
    ) -> None:
        super().__init__([worker], info)
        if info.context <= 0:
            raise NotUsableError(f"{info.name} can't generate")
        self.engine_client = RemoteEngine(worker, name=info.name)
        self.language_model = (language_model or RemoteLanguageModel)(self.engine_client, info)

    def close(self) -> None:
        self.engine_client.close()
