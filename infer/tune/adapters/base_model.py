"""Frozen base of an adapter: a language model whose weights stay packed, or in float."""

from __future__ import annotations

from ... import compress
from ...load import fill, load
from ...plan import Plan
from ...reporter import Reporter
from ..language_model import TrainableLanguageModel, language_model_of
from ..memory.frozen_layers import pass_gradients


def open_base(source: str, format: str, reporter: Reporter) -> TrainableLanguageModel:
    """Load a language model, pack its weights as `format` says ("none" keeps float32), and freeze it.

    Raises `NotUsableError` for a model that is no decoder of text, or whose packed layers pass no gradient.
    """
    plan = Plan(source=source, quant=format, data="random")
    reporter.step("load", source)
    loaded = load(plan)
    base = language_model_of(loaded, source)
    if format != "none" and loaded.module is not None:
        reporter.step("compress", format)
        made = compress.quantize_model(
            loaded.module,
            plan,
            checkpoint=loaded.checkpoint,
            renames=loaded.renames,
            progress=reporter.progress,
        )
        reporter.found(made.findings()[-5:])
    fill(loaded)
    base.model.requires_grad_(False)
    if format != "none":
        pass_gradients(base.model)
    return base
