"""A model as the server sees it, whether it runs in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from ..artifact.manifest import read_report
from ..artifact.model_info import ModelInfo
from ..llm.engine.engine_thread import EngineThread
from ..llm.text.tokenizer import Tokenizer
from .batching.collate import Arrays
from .workers.remote_engine import RemoteEngine
from .workers.remote_language_model import RemoteLanguageModel
from .workers.replica import Replica

if TYPE_CHECKING:
    from ..llm.llm import LanguageModel
    from ..predict.predictor import Predictor

# Work of a batch, or tokens of a prompt, and the seconds that they took.
Speeds = Sequence[tuple[float, float]]
ServedLanguageModel = Union["LanguageModel", RemoteLanguageModel]  # torch is imported where one is opened
EngineClient = EngineThread | RemoteEngine


def _runs_elsewhere(arrays: Arrays) -> Arrays:
    raise RuntimeError("this model runs no batches in this process")


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """A model that was loaded: what it is, and what runs it.

    - `run`: runs a batch in this process; bfloat16 is held in uint16 arrays, as numpy has none.
    - `replicas`: workers that run its batches instead.
    - `language_model`: text side and engine of one that generates text, None of one that is served as tensors.
    - `tokenizer`: opens that of texts in this process; None of one in workers, or that takes no text.
    - `warmup`: to be called once before the first request, returns the speeds seen; does nothing for one in workers.
    - `phases`: seconds of each part of its loading; `speeds`: measured then; `tested`: its self-test passed then.
    - `in_workers`: it runs in processes of its own, which are warm and may be killed.
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
        return cls(
            info=info,
            close=predictor.close,
            run=partial(run_arrays, predictor),
            language_model=predictor.language_model if info.generates_text else None,
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
