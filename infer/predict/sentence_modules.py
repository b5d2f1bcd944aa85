"""Artifacts in sentence-transformers, by its documented way for models of others: a module of one's own.

So `encode`, `predict`, `rank` and all their options are that library's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import InputModule
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..artifact.manifest import BESIDE
from ..errors import UsageError
from .predictor import Predictor

OUTPUTS = {"embedding": "sentence_embedding", "classification": "scores"}
ACTIVATIONS = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "identity": nn.Identity, "softmax": nn.Softmax}


class ArtifactModule(InputModule):
    """The only module of a model: an artifact with its tokenizer, pooling and all layers after that."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        if predictor.task not in OUTPUTS:
            raise UsageError(
                f"{predictor.name} is a {predictor.task} model; it neither embeds nor scores texts"
            )
        self.predictor = predictor
        self.tokenizer = Tokenizer.from_file(str(predictor.path / "tokenizer.json"))
        self.width = predictor.text_model.width

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """Tokenize texts, each after the prompt, or pairs of texts; padded to the longest."""
        if options.get("processing_kwargs"):
            raise UsageError("the artifact's tokenizer has no options", where="processing_kwargs")
        if prompt and not all(isinstance(row, str) for row in inputs):
            raise UsageError("a prompt is for texts, not for pairs of them", where="prompt")
        texts = [f"{prompt or ''}{row}" if isinstance(row, str) else tuple(row) for row in inputs]
        tokens = self.predictor.tokenize(texts)
        return {name: torch.from_numpy(value) for name, value in tokens.items()}

    def forward(self, features: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        """Add the artifact's output to the features: `sentence_embedding` [rows, dim] or `scores` [rows, labels]."""
        found = self.predictor.predict({s.name: features[s.name].cpu() for s in self.predictor.inputs})
        return {**features, OUTPUTS[self.predictor.task]: next(iter(found.values()))}

    def get_embedding_dimension(self) -> int:
        return self.width

    def save(self, output_path: str, *values: Any, **options: Any) -> None:
        """Copy the artifact into the folder."""
        shutil.copytree(self.predictor.path, Path(output_path, BESIDE))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> Self:  # type: ignore[override]
        """Open the artifact of a folder that `save` wrote, or of a repository of such."""
        hub: dict[str, Any] = {
            name: options.get(name) for name in ("token", "cache_folder", "revision", "local_files_only")
        }
        found = cls.load_dir_path(model_name_or_path, subfolder=str(Path(subfolder, BESIDE)), **hub)
        return cls(Predictor.load(str(found), trust_code=bool(options.get("trust_remote_code"))))


class ArtifactCrossEncoder(CrossEncoder):
    """A cross-encoder over an artifact, with the artifact's number of labels."""

    @property
    def num_labels(self) -> int:
        module: Any = self[0]
        return int(module.width)


def sentence_transformer(artifact: str | Path, **options: Any) -> SentenceTransformer:
    """Return an embedding artifact as a `SentenceTransformer`, with the model's prompts.

    `options`: of `Predictor.load`. Raises `UsageError` for an artifact of another task, and what `Predictor.load` does.
    """
    predictor = _opened(artifact, "embedding", options)
    meta = predictor.manifest.meta
    named: dict[str, Any] = {
        "prompts": meta.get("prompts"),
        "default_prompt_name": meta.get("default_prompt"),
    }
    return SentenceTransformer(modules=[ArtifactModule(predictor)], device="cpu", **named)


def cross_encoder(artifact: str | Path, **options: Any) -> CrossEncoder:
    """Return a classifier of texts or pairs as a `CrossEncoder`, with the activation of the model.

    `options`: of `Predictor.load`. Raises `UsageError` for an artifact of another task, and what `Predictor.load` does.
    """
    module = ArtifactModule(_opened(artifact, "classification", options))
    named = module.predictor.manifest.meta.get("activation") or (
        "sigmoid" if module.width == 1 else "identity"
    )
    activation = ACTIVATIONS[named](-1) if named == "softmax" else ACTIVATIONS[named]()
    return ArtifactCrossEncoder(modules=[module], device="cpu", activation_fn=activation)


def _opened(artifact: str | Path, task: str, options: dict[str, Any]) -> Predictor:
    predictor = Predictor.load(artifact, **options)
    if predictor.task != task:
        predictor.close()
        raise UsageError(
            f"{predictor.name} is a {predictor.task} model, not one of {task}", where=str(artifact)
        )
    return predictor
