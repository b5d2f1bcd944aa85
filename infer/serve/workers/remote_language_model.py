"""Language model whose engine is in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...artifact.model_info import ModelInfo
from ...llm.text.text_side import TextSide
from .messages import LanguageModelInfo
from .remote_engine import RemoteEngine


class RemoteLanguageModel(TextSide):
    """Counterpart of `infer.llm.llm.LanguageModel`: text files are read here, the engine is remote."""

    def __init__(self, engine_client: RemoteEngine, info: ModelInfo, facts: LanguageModelInfo) -> None:
        super().__init__(Path(info.path or "."), info.name, facts.vocab_size)
        self.engine_client, self.context, self.start_tokens = engine_client, facts.context, facts.start_tokens
        self.page_bytes, self.adapter_names = facts.page_bytes, facts.adapter_names
        self.tool_form, self.reasoning_form = facts.tool_form, facts.reasoning_form

    def check_grammar(self, constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None:
        """Compile the grammar in the worker; raise `InputError` where it can't be enforced."""
        self.engine_client.check_grammar(constraint, tried)
