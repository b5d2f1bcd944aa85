"""A model as the server sees it, whether it runs in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..artifact.manifest import read_report
from ..artifact.model_info import ModelInfo
from ..llm.engine.requests import Deliver, Request
from ..llm.engine.stats import EngineStats
from ..llm.text.chat_template import ChatTemplate
from ..llm.text.generation_config import GenerationConfig
from ..llm.text.tokenizer import LLMTokenizer, Tokenizer
from .batching.collate import Arrays
from .workers.replica import Replica

if TYPE_CHECKING:
    from ..llm.text.grammar.grammar import GrammarCache
    from ..predict.predictor import Predictor

Speeds = Sequence[
    tuple[float, float]
]  # work of a batch, or tokens of a prompt, and the seconds that they took


class EngineClient(Protocol):
    """Engine of a language model, on a thread of this process or in a worker."""

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine for good; None while it lives."""

    @property
    def beat(self) -> float:
        """Monotonic time of its last step."""

    @property
    def ready(self) -> bool:
        """True if a request would run now."""

    @property
    def pid(self) -> int | None:
        """Process id of its worker; None in this process."""

    @property
    def running(self) -> int:
        """Number of requests that it has not finished."""

    def submit(self, request: Request, deliver: Deliver, *, replay: bool = False) -> None:
        """Start a request, whose outputs `deliver` gets. `replay`: it may begin again where its worker dies."""

    def cancel(self, id: str) -> None: ...

    def stats(self) -> EngineStats: ...


class ServedLanguageModel(Protocol):
    """Text side and engine of a language model: `infer.llm.llm.LanguageModel`, or `RemoteLanguageModel`.

    `context`: tokens of prompt and answer together; `start_tokens`: with which the decoder of an encoder-decoder
    begins, 0 where it reads the prompt itself; `page_bytes`: of its KV cache, all layers together.
    """

    @property
    def engine_client(self) -> EngineClient: ...

    @property
    def folder(self) -> Path: ...

    @property
    def text(self) -> LLMTokenizer: ...

    @property
    def config(self) -> GenerationConfig: ...

    @property
    def template(self) -> ChatTemplate | None: ...

    @property
    def grammars(self) -> GrammarCache | None: ...

    @property
    def context(self) -> int: ...

    @property
    def start_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def adapter_names(self) -> tuple[str, ...]: ...

    def translated(
        self, ids: list[int], src_lang: str | None, tgt_lang: str | None
    ) -> tuple[list[int], int | None]: ...

    def check_grammar(self, constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None: ...


def _runs_elsewhere(arrays: Arrays) -> Arrays:
    raise RuntimeError("this model runs no batches in this process")


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """A model that was loaded: what it is, and what runs it.

    - `run`: runs a batch of a model of tensors in this process; bfloat16 is held in uint16 arrays, as numpy has none.
    - `replicas`: workers that run its batches instead.
    - `language_model`: of a model that generates text; it runs no batches of tensors.
    - `tokenizer`: opens that of a model of tensors in this process; None of one in workers, or that takes no text.
    - `warmup`: to be called once before the first request, returns the speeds seen; does nothing for one in workers.
    - `phases`: seconds of each part of its loading; `speeds`: measured then; `tested`: its self-test passed then.
    """

    info: ModelInfo
    close: Callable[[], None]
    run: Callable[[Arrays], Arrays] = _runs_elsewhere
    replicas: Sequence[Replica] = ()
    language_model: ServedLanguageModel | None = None
    tokenizer: Callable[[], Tokenizer] | None = None
    warmup: Callable[[], Speeds] = tuple
    phases: dict[str, float] = field(default_factory=dict)
    speeds: Speeds = ()
    tested: bool = False
    in_workers: bool = False

    def report(self) -> dict[str, Any]:
        """Return the artifact's report; empty without an artifact."""
        return {} if self.info.path is None else read_report(Path(self.info.path))

    @classmethod
    def of(cls, predictor: Predictor) -> ServedModel:
        """Return the model of a predictor in this process."""
        info = predictor.info
        if info.generates_text:
            return cls(
                info=info,
                close=predictor.close,
                language_model=predictor.language_model,
                warmup=predictor.warmup,
                phases=predictor.phases,
                tested=True,
            )
        return cls(
            info=info,
            close=predictor.close,
            run=partial(run_arrays, predictor),
            tokenizer=(lambda: predictor.tokenizer) if info.padding else None,
            warmup=predictor.warmup,
            phases=predictor.phases,
            tested=True,
        )


def load(path: str, **options: Any) -> ServedModel:
    """Open an artifact in this process; `options` are those of `Predictor.load`, which says what is raised."""
    from ..predict.predictor import Predictor

    return ServedModel.of(Predictor.load(path, **options))


def run_arrays(predictor: Predictor, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Call `predictor.predict`; bfloat16 arrays are uint16 here and torch tensors there."""
    if not any(spec.dtype == "bfloat16" for spec in (*predictor.inputs, *predictor.outputs)):
        return predictor.predict(dict(arrays))
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for spec in predictor.inputs:
        if spec.dtype == "bfloat16":
            tensors[spec.name] = tensors[spec.name].view(torch.bfloat16)
    outputs = predictor.predict(tensors)
    for name, value in outputs.items():
        outputs[name] = (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
    return outputs
