"""Probe of an encoder-decoder: can it run step by step over pages of tokens and of a source, and of which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.func import functional_call

from ....errors import NotUsableError
from ....spec import DECODER_IDS
from ...engine.scheduling.engine_limits import MAX_TOKENS
from ..probe import refusing_failures, require_equal
from ..schedules.schedule_consistency import Uncaptured
from ..step_shape import PAGE, SourceShape, StepShape
from ..token_mixing import sample_tokens
from .cross_attention import cross_attentions
from .encoder_decoder_runner import SourceSequenceRunner
from .encoder_step import PIXELS, first_position, hidden_size, source_of
from .source_pages import TOKENS

_LENGTHS = (7, 5)  # of the source and of the decoder's tokens in the trial run: two pages, and no whole ones


def probe_encoder_decoder(
    model: nn.Module,
    start_ids: Sequence[int],
    *,
    kv_dtype: str,
    page: int = PAGE,
    run: bool = True,
    image: Sequence[int | str] = (),
    end_ids: Sequence[int] = (),
) -> StepShape:
    """Return the sizes of an encoder-decoder; with `run`, after a trial run against its own forward.

    `start_ids`: the tokens with which its decoder begins; `image`: channels, height and width of a model of images;
    `end_ids`: tokens that end its text, where its generation settings do not tell. Raises
    `NotUsableError` with the reason.
    """
    with refusing_failures():
        shape = _shape(model, start_ids, page, kv_dtype, image)
        if shape.source is not None and end_ids:
            shape = replace(shape, source=replace(shape.source, end_ids=tuple(end_ids)))
        if run and not any(parameter.is_meta for parameter in model.parameters()):
            _compare(model, shape)
    return shape


def _shape(
    model: Any, start_ids: Sequence[int], page: int, kv_dtype: str, image: Sequence[int | str]
) -> StepShape:
    if not start_ids:
        raise NotUsableError("neither generation_config.json nor config.json has a decoder_start_token_id")
    reads_images = model.main_input_name == PIXELS
    cross, config = cross_attentions(model), model.get_decoder().config if reads_images else model.config
    heads, width = cross[0].heads, cross[0].width
    positions = getattr(config, "max_position_embeddings", None)
    most = getattr(config, "max_target_positions", None) or positions
    if reads_images and most:
        most = int(most) - (first_position(model) or 0)
    if hidden_size(model) < 1:
        raise NotUsableError("its configuration has no d_model")
    return StepShape(
        layers=len(cross),
        query_heads=heads,
        kv_heads=heads,
        head_dim=width,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        max_positions=int(most or 1 << 20),
        page=page,
        kv_dtype=kv_dtype,
        source=_image(model, tuple(start_ids), image)
        if reads_images
        else _source(model, tuple(start_ids), positions),
    )


def _image(model: Any, start_ids: tuple[int, ...], image: Sequence[int | str]) -> SourceShape:
    """Return the sizes of a source that is an image; its rows are counted by a run without values."""
    sizes = tuple(size for size in image if isinstance(size, int))
    if len(sizes) != 3:
        raise NotUsableError(
            "images of one size are encoded, and neither its preprocessing nor its configuration fixes that size",
            hint="Give it, such as --input pixel_values=float32[batch,3,384,384]",
        )
    if getattr(model, "encode_source", None) is not None:
        return _image_and_text(model, start_ids, sizes)
    encoder = model.get_encoder()
    out = _without_values(encoder, torch.zeros((1, *sizes), device="meta"))
    return SourceShape(PIXELS, int(out.last_hidden_state.shape[1]), start_ids, features=sizes)


def _image_and_text(model: Any, start_ids: tuple[int, ...], sizes: tuple[int, ...]) -> SourceShape:
    """Return the sizes of a source of an image and token ids, whose rows come after those of the image, if any."""
    tokens = torch.zeros((1, 1), dtype=torch.int64, device="meta")
    out = _without_values(_SourceEncoder(model), torch.zeros((1, *sizes), device="meta"), tokens)
    prefix = int(out.last_hidden_state.shape[1]) - 1
    encoder = model.get_encoder()
    most = int(getattr(encoder.config, "max_position_embeddings", 0) or MAX_TOKENS)
    words = int(encoder.get_input_embeddings().weight.shape[0])
    return SourceShape(PIXELS, most, start_ids, words, features=sizes, prefix_rows=prefix)


class _SourceEncoder(nn.Module):
    """Encoder of an image and token ids as a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Any:
        return self.model.encode_source(pixel_values=pixel_values, input_ids=input_ids)


def _without_values(module: nn.Module, *args: Tensor) -> Any:
    """Run a module on the meta device, for the shapes of its outputs."""
    named = {*module.named_parameters(), *module.named_buffers()}
    with torch.no_grad():
        return functional_call(module, {name: value.to("meta") for name, value in named}, args=args)


def _source(model: Any, start_ids: tuple[int, ...], positions: int | None) -> SourceShape:
    config = model.config
    if model.main_input_name == "input_features":
        most = int(config.max_source_positions)
        return SourceShape("input_features", most, start_ids, features=(int(config.num_mel_bins), 2 * most))
    words = int(model.get_encoder().get_input_embeddings().weight.shape[0])
    return SourceShape("input_ids", int(positions or MAX_TOKENS), start_ids, words)


def _compare(model: Any, shape: StepShape) -> None:
    """Raise unless two sources over small pages give the logits of the model's own forward."""
    small = replace(shape, page=4, kv_dtype="float32")
    source = source_of(small)
    given: dict[str, Tensor] = {}
    if source.features:
        generator = torch.Generator().manual_seed(0)
        given[source.name] = torch.randn((2, *source.features), generator=generator)
    if source.reads_text:
        rows = [tokens[: _LENGTHS[0]] for tokens in sample_tokens(source.vocab_size or shape.vocab_size)]
        given[TOKENS] = torch.stack([rows[0], rows[1].flip(0)])
    ids = torch.stack([tokens[: _LENGTHS[1]] for tokens in sample_tokens(shape.vocab_size)])
    named = {**given, DECODER_IDS: ids}
    with torch.no_grad():
        expected = model(**named, use_cache=False).logits.float()
    got = SourceSequenceRunner(Uncaptured(model, small, "cpu"), small).run(named)["logits"]
    require_equal(got, expected)
