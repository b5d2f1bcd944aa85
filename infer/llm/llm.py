"""Language model of an opened artifact: its step, tokenizer, chat template, engine and engine thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..distribution import install
from ..errors import InputError, NotUsableError, UsageError
from ..spec import parse_size
from .engine.draft_model import DraftModel
from .engine.drafts import Speculation
from .engine.engine import Engine
from .engine.engine_thread import EngineThread
from .engine.prompt_lookup import PromptLookup
from .engine.sampling.sampling_options import Sampling
from .engine.scheduling.engine_limits import EngineLimits, default_limits
from .lora.adapters import Adapters
from .step.step_shape import StepShape
from .text.chat_template import no_template
from .text.grammar.grammar import GrammarCache
from .text.text_side import TextSide

__all__ = ["LanguageModel", "parse_size"]
DEFAULT_TOKENS = Sampling().max_tokens


class LanguageModel(TextSide):
    """Language model. `step` runs the graph of `llm.step` over a cache of `shape`; `folder` has its text files.

    Engine and thread are made when they are first needed. `kv_bytes` None: a share of the memory that is free.
    `speculation`: text is drafted where that was measured to pay, by the model `draft`, or else, where it repeats
    itself, by prompt lookup. Raises `UsageError` for a draft model that does not fit.
    """

    def __init__(
        self,
        step: Any,
        shape: StepShape,
        folder: Path,
        *,
        name: str = "the model",
        device: str = "cpu",
        kv_bytes: int | None = None,
        limits: EngineLimits | None = None,
        speculation: bool = True,
        draft: LanguageModel | None = None,
    ) -> None:
        end_ids = shape.source.end_ids if shape.source is not None else ()
        super().__init__(folder, name, shape.vocab_size, end_ids)
        self.step, self.shape, self.device = step, shape, device
        self._kv_bytes, self._limits, self._speculation = kv_bytes, limits, speculation
        self._draft = draft
        self._made: tuple[Engine, EngineThread] | None = None
        self._closed, self._making = False, threading.Lock()
        if draft is not None:
            self._check_draft(draft)

    @cached_property
    def grammars(self) -> GrammarCache | None:
        """Cache of compiled grammars; None without a tokenizer or llguidance (see `check_grammar`)."""
        if self.text_or_none is None or find_spec("llguidance") is None:
            return None
        return GrammarCache(self.text.tokenizer, self.vocab_size, self.eos_ids)

    @cached_property
    def adapters(self) -> Adapters | None:
        """Loaded LoRA adapters; None for an artifact that was made without room for them."""
        shape = self.shape.adapters
        return None if shape is None else Adapters(shape, self.device)

    def load_adapter(self, name: str, folder: Path | str) -> None:
        """Load a LoRA adapter, see `Adapters.load`; raises `UsageError` for a model without room for any."""
        self._adapters.load(name, folder)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return () if self.adapters is None else tuple(self.adapters.names)

    @property
    def _adapters(self) -> Adapters:
        if self.adapters is None:
            hint = "Make it again with infer optimize … --adapters SLOTS"
            raise UsageError(f"{self.name} has no room for adapters", hint=hint)
        return self.adapters

    def check_grammar(self, constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None:
        """Compile a grammar outside the engine's thread; raises `InputError` if it can't be enforced.

        `tried`: bytes and seconds that it took in a trial.
        """
        if self.grammars is None:
            _ = self.text
            raise NotUsableError("structured output needs the package llguidance", hint=install("serve"))
        self.grammars.check(constraint, *tried)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the KV cache, all layers together."""
        return self.shape.layers * self.shape.page_bytes

    @property
    def engine(self) -> Engine:
        """Engine of the thread, the only one that may step it."""
        return self._running[0]

    @property
    def engine_client(self) -> EngineThread:
        """Thread that runs the engine."""
        return self._running[1]

    @property
    def _running(self) -> tuple[Engine, EngineThread]:
        with self._making:
            if self._closed:
                raise UsageError(f"{self.name} is closed", hint="Open the artifact again")
            if self._made is None:
                engine = self.new_engine()
                engine.prepare()
                self._made = engine, EngineThread(engine, name=self.name)
            return self._made

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self.engine.context

    @property
    def start_tokens(self) -> int:
        """Tokens with which the decoder of an encoder-decoder begins; 0 where it reads the prompt itself."""
        source = self.shape.source
        if source is None or not source.reads_text:
            return 0
        text = self.text_or_none
        return max(len(source.start_ids), 2 if text is not None and text.languages else 0)

    def new_engine(
        self,
        *,
        kv_bytes: int | None = None,
        limits: EngineLimits | None = None,
        speculation: bool | None = None,
    ) -> Engine:
        """Make another engine over the same step, with a cache of its own; the caller steps it."""
        drafts = self._speculation if speculation is None else speculation
        text, kv_bytes = self.text_or_none, kv_bytes or self._kv_bytes
        chosen = limits or self._limits or default_limits(self.device)
        speculator: Speculation | None = PromptLookup() if drafts else None
        if drafts and (draft := self._draft) is not None:
            kept = None
            if kv_bytes is not None:  # as many tokens in either cache
                each, more = self.shape.bytes_per_token, draft.shape.bytes_per_token
                kept = int(kv_bytes * more / (each + more))
                kv_bytes -= kept
            speculator = DraftModel(
                draft.step,
                draft.shape,
                vocab_size=self.vocab_size,
                limits=chosen,
                kv_bytes=kept,
                device=self.device,
            )
        return Engine(
            self.step,
            self.shape,
            tokenizer=None if text is None else text.tokenizer,
            eos_ids=self.eos_ids,
            grammars=self.grammars,
            adapters=self.adapters,
            speculation=speculator,
            kv_bytes=kv_bytes,
            limits=chosen,
            device=self.device,
        )

    def _check_draft(self, draft: LanguageModel) -> None:
        """Raise `UsageError` unless `draft` can draft for this model."""
        for model, what in ((self, "takes no drafts"), (draft, "can't draft")):
            if model.shape.source is not None:
                raise UsageError(f"{model.name} {what}: it is an encoder-decoder", where="draft")
            if model.shape.state_floats:
                why = "the state of its layers can't take back tokens that are rejected"
                raise UsageError(f"{model.name} {what}: {why}", where="draft")
        if draft.shape.adapters is not None:
            hint = "Make its artifact without --adapters"
            raise UsageError(f"{draft.name} can't draft: it has room for adapters", where="draft", hint=hint)
        if not self._speculation:
            said = "a draft model drafts nothing where speculation is off"
            raise UsageError(said, where="draft", hint="Give one of the two")
        if self._limits is not None and self._limits.batch_invariant:
            raise UsageError(
                "batch_invariant answers are not drafted", where="draft", hint="Give one of the two"
            )
        texts = [model.text_or_none for model in (self, draft)]
        vocabularies = [None if text is None else text.tokenizer.get_vocab() for text in texts]
        if vocabularies[0] != vocabularies[1] or (
            None in vocabularies and self.vocab_size != draft.vocab_size
        ):
            sizes = f"{draft.vocab_size} token ids, {self.name} {self.vocab_size}"
            raise UsageError(
                f"{draft.name} can't draft for {self.name}: its tokens are others (it has {sizes})",
                where="draft",
                hint="A draft model is a smaller one of the same family, with the same tokenizer",
            )

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self.text.encode(text, special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.text.decode(ids, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        return self.text.token_bytes(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation as a prompt, special tokens included; `UsageError` without a chat template."""
        if self.template is None:
            raise no_template(self.name)
        return self.template.render(messages, tools=tools, **kwargs)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Render a conversation as the token ids of a prompt."""
        return self.encode(self.render_chat(messages, tools, **kwargs), special=False)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Convert a prompt to token ids, which may be given as they are; `InputError` for anything else."""
        given: Any = prompt
        if isinstance(given, str):
            ids = self.encode(given)
        elif isinstance(given, Sequence) and not isinstance(given, bytes):
            ids = list(given)
        else:
            raise InputError(f"expected text or token ids, got {type(prompt).__name__}", where="prompt")
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise InputError("expected token ids", where="prompt")
        if not ids:
            raise InputError("the prompt is empty", where="prompt")
        return ids

    def sampling(self, prompt_tokens: int, given: Mapping[str, Any]) -> Sampling:
        """Complete `given` by the checkpoint's recommendations; `max_tokens` defaults to 256 or fewer that fit."""
        made = dict(given)
        if made.get("max_tokens") is None:
            read = self.start_tokens or prompt_tokens
            made["max_tokens"] = max(1, min(DEFAULT_TOKENS, self.context - read))
        return self.config.complete(made)

    def close(self) -> None:
        with self._making:
            self._closed, made = True, self._made
        if made is not None:
            made[1].close()
