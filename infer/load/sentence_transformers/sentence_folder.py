"""Folders of sentence-transformers: their modules after the Transformer, prompts, limits and activation of scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import SourceError
from ...regular_files import read_json
from ...weights import Checkpoint, in_memory, joined
from ..sources.state_dict_source import open_weights_only
from .modules_json import (
    Module,
    build_layer,
    build_pooling,
    check_order,
    read_modules,
    transformer_folder,
    weights_path,
)
from .multi_vector import TASK as MULTI_VECTOR
from .multi_vector import MultiVector, read_multi_vector
from .pooling_layers import Dense, EmbeddingHead, Normalize, Pooling, TokenHead

TOKENS = "token_embeddings"
PROJECTION = "linear.weight"  # of Stanford's checkpoints
SCORES = ("Sigmoid", "Identity", "Softmax", "Tanh")


@dataclass(frozen=True)
class SentenceFolder:
    """Settings of a sentence-transformers folder; all empty for a folder without modules.json.

    `transformer`: the folder of its config.json and weights; `modules`: those after the Transformer; `task`:
    "embedding", "multi-vector-embedding", "classification" (a cross-encoder) or ""; `prompts`: name → text put before
    an input; `default_prompt`: the name used where none is given; `activation`: of a cross-encoder's scores, such as
    "sigmoid".
    """

    transformer: Path
    modules: tuple[Module, ...] = ()
    task: str = ""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    activation: str = ""
    multi_vector: MultiVector | None = None

    @property
    def sparse(self) -> bool:
        """True for SPLADE's embedding: one weight per token of the vocabulary."""
        return any(module.kind == "SpladePooling" for module in self.modules)

    def head(self) -> EmbeddingHead:
        """Build the head with its parameters on the meta device; raises `SourceError` for what it can't do."""
        pooling: nn.Module | None = None
        layers: dict[str, nn.Module] = {}
        for index, module in enumerate(self.modules):
            if module.kind.endswith("Pooling"):
                pooling = build_pooling(module)
            elif module.kind != "Dropout":
                layers[str(index)] = build_layer(module)
        return EmbeddingHead(pooling, layers if self.modules else None)

    def token_head(self, config: Any) -> TokenHead:
        """Build the layers over each token of a late-interaction model, on the meta device.

        `config`: of its encoder. Stanford's checkpoints hold their projection beside it, without a bias.
        """
        if self.multi_vector is None:
            raise SourceError("expected a late-interaction model", where=str(self.transformer))
        layers: dict[str, nn.Module] = {}
        for index, module in enumerate(self.modules):
            if module.kind not in ("Dropout", "MultiVectorMask", "Normalize"):
                layers[str(index)] = build_layer(module, over=TOKENS)
        if self.multi_vector.inline:
            size = int(self._projection().shape[0])
            layers["0"] = Dense((config.hidden_size, size), nn.Identity(), bias=False, residual=False)
        return TokenHead(layers, hides_expansion=self.multi_vector.hides_expansion)

    def weights(self, transformer: Checkpoint) -> Checkpoint:
        """Join the weights of the modules to those of the Transformer, under the names of `Encoder`."""
        found: dict[str, Checkpoint] = {"": transformer}
        for index, module in enumerate(self.modules):
            if module.kind in ("Dense", "LayerNorm"):
                found[f"head.layers.{index}."], *_ = open_weights_only(weights_path(module.folder))
        if self.multi_vector is not None and self.multi_vector.inline:
            found["head.layers.0."] = in_memory({PROJECTION: self._projection()})
        return joined(found.items()) if len(found) > 1 else transformer

    def _projection(self) -> Tensor:
        """Read the projection of Stanford's checkpoint; raise `SourceError` where it has none."""
        path = weights_path(self.transformer)
        checkpoint, *_ = open_weights_only(path)
        if PROJECTION not in checkpoint:
            raise SourceError(f"expected the projection {PROJECTION!r} of a ColBERT", where=str(path))
        return checkpoint[PROJECTION].read()

    def meta(self) -> dict[str, Any]:
        """Collect what serving needs, as JSON: pooling, prompts, activation of scores."""
        made: dict[str, Any] = {}
        if self.multi_vector is not None:
            made["multi_vector"] = self.multi_vector.meta(self.transformer / "tokenizer.json", self.prompts)
            return made | ({"lower_case": True} if self.lower_case else {})
        if self.task != "classification":
            head = self.head()
            modes = head.pooling.modes if isinstance(head.pooling, Pooling) else ("splade",)
            made = {
                "pooling": "+".join(modes),
                "normalize": any(isinstance(layer, Normalize) for layer in head.layers.values()),
            }
        if self.sparse:
            made["sparse"] = True
        if self.prompts and not self._prompts_excluded():
            made |= {"prompts": self.prompts, "default_prompt": self.default_prompt}
        if self.lower_case:
            made["lower_case"] = True
        if self.activation:
            made["activation"] = self.activation
        return made

    def _prompts_excluded(self) -> bool:
        """Return True if a pooling leaves the tokens of prompts out; raise if such a prompt is the default."""
        out = [m for m in self.modules if m.kind == "Pooling" and m.config.get("include_prompt") is False]
        if out and self.default_prompt and self.prompts.get(self.default_prompt):
            raise SourceError(
                f"the pooling leaves out the tokens of the prompt {self.default_prompt!r}, which a captured graph "
                "does not know",
                where=str(out[0].folder / "config.json"),
                hint="Set default_prompt_name to null: texts without a prompt are pooled the same",
            )
        return bool(out)


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read modules.json and its companions; raise `SourceError` for modules that are not known."""
    listing, own = folder / "modules.json", folder / "config_sentence_transformers.json"
    said = read_json(own, absent_ok=True)
    modules = read_modules(listing) if listing.is_file() else []
    transformer = transformer_folder(folder)
    limits = read_json(transformer / "sentence_bert_config.json", absent_ok=True)
    config = read_json(transformer / "config.json", absent_ok=True)
    metadata = read_json(folder / "artifact.metadata", absent_ok=True)
    multi_vector = read_multi_vector(folder, said, limits, modules, config, metadata)
    prompts = said.get("prompts") or {}
    default = said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise SourceError("expected prompts as an object of texts", where=str(own))
    if default is not None and default not in prompts:
        raise SourceError(f"default_prompt_name is {default!r}, which prompts do not hold", where=str(own))
    pairs = (
        said.get("model_type") == "CrossEncoder"
        or limits.get("transformer_task") == "sequence-classification"
    )
    if modules:
        check_order(modules, listing, pooled=not pairs and multi_vector is None)
    if multi_vector is not None:
        return SentenceFolder(
            transformer,
            modules=tuple(modules[1:]),
            task=MULTI_VECTOR,
            prompts=prompts,
            lower_case=limits.get("do_lower_case") is True,
            multi_vector=multi_vector,
        )
    return SentenceFolder(
        transformer,
        modules=tuple(modules[1:]),
        task="" if not modules else "classification" if pairs else "embedding",
        prompts=prompts,
        default_prompt=default,
        lower_case=limits.get("do_lower_case") is True,
        activation=_activation(said.get("activation_fn"), own),
    )


def score_activation(config: dict[str, Any], where: Path) -> str:
    """Return the activation that a cross-encoder's config.json names, in lower case; empty if it names none."""
    inner = config.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, dict) else None
    return _activation(named or config.get("sbert_ce_default_activation_function"), where)


def _activation(named: Any, where: Path) -> str:
    if named is None:
        return ""
    kind = str(named).rpartition(".")[2]
    if kind not in SCORES or not str(named).startswith("torch.nn."):
        raise SourceError(
            f"expected {', '.join(SCORES)} of torch.nn over the scores, got {named!r}", where=str(where)
        )
    return kind.lower()
