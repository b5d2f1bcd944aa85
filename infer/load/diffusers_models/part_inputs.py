"""Tensors that each class of a pipeline of diffusers takes and gives, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import SourceError
from ...spec import TensorSpec
from ..sources.diffusers_pipeline import AUTOENCODER

Config = Mapping[str, Any]
Inputs = Mapping[str, Tensor]
Sizes = tuple[int | str, ...]


@dataclass(frozen=True)
class Part:
    """Inputs of a model, the names of its outputs, and the call that computes them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    call: Callable[[Any, Inputs], Any]
    remark: str = ""


def part_of(kind: str, config: Config, key: str | None) -> Part:
    """Return the inputs of a class of a pipeline; raise `SourceError` for options of it that are not known here."""
    if kind == AUTOENCODER:
        return _encoder(config) if key == "encoder" else _decoder(config)
    makers = {
        "UNet2DModel": _unet,
        "UNet2DConditionModel": _conditional_unet,
        "DiTTransformer2DModel": _dit,
        "PixArtTransformer2DModel": _pixart,
        "SD3Transformer2DModel": _sd3,
        "CLIPTextModel": _clip_text,
        "CLIPTextModelWithProjection": _clip_text,
        "T5EncoderModel": _t5,
    }
    return makers[kind](config)


def _spec(name: str, *sizes: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, ("batch", *sizes))


def _image(config: Config, shrink: int = 1) -> Sizes:
    """Return the height and width of the images, by `sample_size`."""
    size = config.get("sample_size")
    if isinstance(size, int):
        return size // shrink, size // shrink
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]) // shrink, int(size[1]) // shrink
    return "height", "width"


def _plain(model: Any, inputs: Inputs) -> Any:
    return model(**inputs, return_dict=False)[0]


def _classes(config: Config) -> tuple[TensorSpec, ...]:
    """Return the labels of a model with an embedding of classes."""
    if config.get("class_embed_type") not in (None, "timestep"):
        raise SourceError(f"a model with class_embed_type {config['class_embed_type']!r} is not opened")
    labelled = config.get("num_class_embeds") or config.get("class_embed_type")
    return (_spec("class_labels", dtype="int64"),) if labelled else ()


def _unet(config: Config) -> Part:
    image = _spec("sample", config["in_channels"], *_image(config))
    return Part((image, _spec("timestep"), *_classes(config)), ("sample",), _plain)


def _conditional_unet(config: Config) -> Part:
    added, width = config.get("addition_embed_type"), config.get("cross_attention_dim")
    if added not in (None, "text_time") or config.get("encoder_hid_dim_type") or not isinstance(width, int):
        raise SourceError(
            f"a UNet2DConditionModel with addition_embed_type {added!r}, encoder_hid_dim_type "
            f"{config.get('encoder_hid_dim_type')!r} and cross_attention_dim {width!r} is not opened",
            hint="Give --model file.py:factory that calls it with tensors by name",
        )
    inputs = [_spec("sample", config["in_channels"], *_image(config)), _spec("timestep")]
    inputs += [_spec("encoder_hidden_states", "seq", width), *_classes(config)]
    if added is None:
        return Part(tuple(inputs), ("sample",), _plain)
    # Stable Diffusion XL: pooled text, and six numbers on size and crop, each embedded on its own.
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    inputs += [_spec("text_embeds", pooled), _spec("time_ids", 6)]

    def call(model: Any, given: Inputs) -> Any:
        more = {name: given[name] for name in ("text_embeds", "time_ids")}
        return _plain(model, {**{n: v for n, v in given.items() if n not in more}, "added_cond_kwargs": more})  # type: ignore[dict-item]

    return Part(tuple(inputs), ("sample",), call)


def _dit(config: Config) -> Part:
    inputs = _spec("hidden_states", config["in_channels"], *_image(config)), _spec("timestep", dtype="int64")
    return Part((*inputs, _spec("class_labels", dtype="int64")), ("sample",), _plain)


def _pixart(config: Config) -> Part:
    asked = config.get("use_additional_conditions")
    if asked or (asked is None and config.get("sample_size") == 128):
        raise SourceError("a PixArtTransformer2DModel with use_additional_conditions is not opened")
    inputs = (
        _spec("hidden_states", config["in_channels"], *_image(config)),
        _spec("timestep"),
        _spec("encoder_hidden_states", "seq", config["caption_channels"]),
        _spec("encoder_attention_mask", "seq", dtype="int64"),
    )

    def call(model: Any, given: Inputs) -> Any:
        return _plain(model, {**given, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}})  # type: ignore[dict-item]

    return Part(inputs, ("sample",), call)


def _sd3(config: Config) -> Part:
    inputs = (
        _spec("hidden_states", config["in_channels"], *_image(config)),
        _spec("timestep"),
        _spec("encoder_hidden_states", "seq", config["joint_attention_dim"]),
        _spec("pooled_projections", config["pooled_projection_dim"]),
    )
    return Part(inputs, ("sample",), _plain)


def _clip_text(config: Config) -> Part:
    """Return CLIP's text encoder: last hidden states, those before its last layer, and the pooled or projected text."""

    def call(model: Any, given: Inputs) -> Any:
        found = model(input_ids=given["input_ids"], output_hidden_states=True)
        projected = getattr(found, "text_embeds", None)
        pooled = found.pooler_output if projected is None else projected
        return found.last_hidden_state, found.hidden_states[-2], pooled

    outputs = ("last_hidden_state", "penultimate_hidden_state", "pooled")
    return Part((_spec("input_ids", "seq", dtype="int64"),), outputs, call)


def _t5(config: Config) -> Part:
    inputs = tuple(_spec(name, "seq", dtype="int64") for name in ("input_ids", "attention_mask"))
    return Part(inputs, ("last_hidden_state",), lambda model, x: model(**x).last_hidden_state)


def _shrink(config: Config) -> int:
    return int(2 ** (len(config["block_out_channels"]) - 1))


def _decoder(config: Config) -> Part:
    latents = _spec("latents", config["latent_channels"], *_image(config, _shrink(config)))
    factor = config.get("scaling_factor", 0.18215)
    remark = (
        f"the decoder; it takes latents divided by scaling_factor, {factor}. --key encoder opens the encoder"
    )
    return Part(
        (latents,), ("sample",), lambda model, x: model.decode(x["latents"], return_dict=False)[0], remark
    )


def _encoder(config: Config) -> Part:
    image = _spec("sample", config["in_channels"], *_image(config))
    remark = "gives mean and logarithm of the variance of the latents"
    return Part(
        (image,), ("moments",), lambda model, x: model.encode(x["sample"]).latent_dist.parameters, remark
    )
