"""Models of transformers drawn from its Auto mappings, and their default configurations shrunk to tiny sizes.

Widths are divided by one number, so that they still divide each other; layers, experts and vocabularies are cut to a
few. Sizes that a class computes from others are not touched.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.models import decoder_configs, head_configs

VOCABULARY = 320  # of checks.write_byte_tokenizer
POSITIONS = 160
HYBRID_LAYERS = 4  # one of four is of another kind
MOST_PARAMETERS = 80e6
WIDTHS = re.compile(
    r"(^|_)(hidden_size|hidden_sizes|dim|dims|d_model|d_ff|d_inner|n_embd|embed_dim|embed_dims|embedding_size|width|"
    r"intermediate_size|intermediate_sizes|ffn_dim|feedforward_dim|mlp_dim|channels|channel|head_dim|d_kv|"
    r"projection_dim|inner_dim|rank|ffn_hidden_size|n_inner|feature_size|neck_hidden_sizes|proj_size|layer_sizes|"
    r"expand_dim|hidden_dims|filters|embed_proj_size|encoder_hidden_size|decoder_hidden_size)$"
)
KEPT = re.compile(r"num_channels|in_channels$|input_channels|output_channels|num_mel|spec_|feature_dim|_bins")
LAYERS = re.compile(
    r"(num_.*layers|num_.*blocks|n_layers?|depths?|num_layers|layers|encoder_layers|decoder_layers)$"
)
EXPERTS = re.compile(r"(num_.*experts|n_routed_experts|num_queries|num_object_queries)$")
TOKEN = re.compile(r"_token_id|_token_index|_id$|token_ids$|_token_type$")
LIMITS = {"max_position_embeddings": POSITIONS, "n_positions": POSITIONS, "max_seq_len": POSITIONS}


class Drawn(NamedTuple):
    """Model class of transformers, its model type, and the Auto mapping that it was drawn from."""

    task: str
    model_type: str
    model: str

    @property
    def name(self) -> str:
        return f"{self.model_type}, {self.model}"


def mappings() -> dict[str, dict[str, Sequence[str]]]:
    """Return the Auto mappings of this version of transformers: task → model type → classes."""
    from transformers.models.auto import modeling_auto

    found = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES") and "BACKBONE" not in name:
            task = name.removeprefix("MODEL_").removeprefix("FOR_").removesuffix("MAPPING_NAMES").strip("_")
            classes = {kind: (c,) if isinstance(c, str) else tuple(c) for kind, c in mapping.items()}
            found[task or "BASE"] = classes
    return found


def draw(seed: int, count: int) -> list[Drawn]:
    """Draw `count` classes of model types that the models table has no row of, from one task after the other."""
    chance = random.Random(seed)
    tasks = sorted(mappings().items())
    known = {entry.config for entry in head_configs.ENTRIES.values()}
    known |= {given[0] for given in decoder_configs.CONFIGS.values()}
    found: list[Drawn] = []
    while len(found) < count:
        chance.shuffle(tasks)
        for task, classes in tasks:
            left = sorted(set(classes) - known)
            if left and len(found) < count:
                kind = chance.choice(left)
                known.add(kind)
                found.append(Drawn(task, kind, chance.choice(classes[kind])))
    return found


def named(text: str) -> Drawn:
    """Return the class that `MODEL_TYPE:CLASS` names."""
    kind, _, model = text.partition(":")
    return Drawn("NAMED", kind, model)


def build(drawn: Drawn) -> nn.Module:
    """Build a tiny model with random weights; raises the error of the last try where no size can be built."""
    import transformers

    cls = getattr(transformers, drawn.model)
    failure: Exception = ValueError(f"{drawn.model} has more than {MOST_PARAMETERS:g} parameters")
    for sizes in _sizes(cls.config_class):
        try:
            config = cls.config_class(**sizes)
            with torch.device("meta"):
                count = sum(p.numel() for p in cls(config).parameters())
            if count > MOST_PARAMETERS:
                continue
            torch.manual_seed(0)
            return _scattered(cls(cls.config_class(**sizes)).eval())
        except Exception as error:  # noqa: BLE001 - sizes that don't fit each other: the next ones
            failure = error
    raise failure


def _scattered(model: nn.Module) -> nn.Module:
    """Give matrices weights by which the outputs vary, as the rows of the models table have."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and len(parameter) and parameter.is_floating_point():
            nn.init.normal_(parameter, std=1.2 / max(1, parameter[0].numel()) ** 0.5)
    return model


def _sizes(config_class: Any) -> Iterator[dict[str, Any]]:
    """Yield settings from the smallest on; the last ones are the default."""
    for widths in (8, 4, 2, 1):
        yield _shrunk(config_class, widths)
    yield {}


def _shrunk(config_class: Any, widths: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    defaults = _defaults(config_class)
    layers = HYBRID_LAYERS if "layer_types" in defaults else 2
    for name, default in defaults.items():
        value = _small(name, default, widths, layers)
        if value != default:
            found[name] = value
    try:
        made = config_class()
    except Exception:  # noqa: BLE001 - a class that wants its parts given
        made = None
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(made, name, None)
        if part is None:
            continue
        given, own = _changed(part), _shrunk(type(part), widths)
        if given.get("out_features") or given.get("out_indices"):  # names of layers that have to be there
            own = {key: value for key, value in own.items() if not LAYERS.search(key)}
        else:
            given |= {key: _small(key, value, widths) for key, value in given.items()}
        found[name] = type(part)(**{**own, **given})
    return found


def _changed(part: Any) -> dict[str, Any]:
    """Return what a configuration within another sets beside its class's defaults."""
    diff = dict(part.to_diff_dict())
    dropped = ("transformers_version", "model_type", "layer_types", "architectures", "dtype")
    return {name: value for name, value in diff.items() if name not in dropped}


def _defaults(config_class: Any) -> dict[str, Any]:
    parameters = inspect.signature(config_class.__init__).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _small(name: str, value: Any, widths: int, layers: int = 2) -> Any:
    """Return a smaller value of a setting, or the value itself."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
        if not TOKEN.search(name):
            return type(value)(_small(name, v, widths, layers) for v in value)
        return value
    if not isinstance(value, int):
        return value
    if TOKEN.search(name):
        return value if value < VOCABULARY else 3 + sum(map(ord, name)) % 60
    if "vocab" in name and value > VOCABULARY:
        return VOCABULARY
    if name in LIMITS:
        return min(value, LIMITS[name])
    if EXPERTS.search(name):
        return min(value, 8)
    if LAYERS.search(name):
        return min(value, layers)
    if WIDTHS.search(name) and not KEPT.search(name) and value >= 8 and value % widths == 0:
        return max(4, value // widths)
    return value
