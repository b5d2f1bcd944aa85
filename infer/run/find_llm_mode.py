"""Decision, after loading, whether a language model runs as a step that generates or scores whole windows."""

from __future__ import annotations

from torch import nn

from .. import load
from ..errors import NotUsableError
from ..llm.step.attention.latent_attention import keep_latents
from ..llm.step.encoder_decoder.encoder_decoder_probe import probe_encoder_decoder
from ..llm.step.paged_step import with_adapters
from ..llm.step.probe import probe
from ..llm.step.step_shape import StepShape
from ..load.heads.text import Decoder, EncoderDecoder
from ..options.values import parse_adapters
from ..plan import Plan
from ..reporter import Reporter
from ..results import ScoresOnly
from ..spec import Finding
from .resolve_plan import ANOTHER_TASK


def find_mode(
    plan: Plan, loaded: load.LoadedModel, reporter: Reporter
) -> tuple[StepShape | None, ScoresOnly | None, bool]:
    """Decide whether a language model will be a step that generates, or scores whole windows of text: the fields of
    `LlmMode`.

    With `--task generate` the reason why it can't is a `NotUsableError`, before anything is quantized or compiled.
    """
    latents = None
    if plan.task != "score" and plan.device == "cpu" and isinstance(loaded.module, Decoder):
        latents = keep_latents(loaded.module.model)  # no GPU kernel takes heads as wide
    try:
        shape = _probed(plan, loaded)
    except NotUsableError as error:
        return None, no_step(plan, str(error), reporter), False
    reporter.found([latents] if latents is not None else [])
    reporter.found([*shape.findings(), *(shape.adapters.findings() if shape.adapters is not None else ())])
    return shape, None, latents is not None


def _probed(plan: Plan, loaded: load.LoadedModel) -> StepShape:
    if plan.task == "score":
        raise NotUsableError("requested by --task score")
    if isinstance(loaded.module, EncoderDecoder):
        return _probed_source(plan, loaded, loaded.module.model)
    if not isinstance(loaded.module, Decoder):
        raise NotUsableError("only decoders of transformers can be run over a paged KV cache")
    # StreamedLayer weights are read from disk at each forward: the schedules of the lowered form judge them.
    shape = probe(loaded.module.model, kv_dtype=plan.kv_dtype, run_chunks=loaded.load != "offload")
    if not plan.adapters:
        return shape
    return with_adapters(loaded.module.model, shape, *parse_adapters(plan.adapters))


def _probed_source(plan: Plan, loaded: load.LoadedModel, model: nn.Module) -> StepShape:
    """Probe an encoder-decoder; raise for adapters, which its two graphs do not support."""
    if plan.adapters:
        raise NotUsableError("--adapters has no room in the two graphs of an encoder-decoder; leave it out")
    start = loaded.meta.get("decoder_start_ids", ())
    return probe_encoder_decoder(
        *(model, start),
        kv_dtype=plan.kv_dtype,
        run=loaded.load != "offload",
        image=loaded.inputs[0].shape[1:],
        end_ids=loaded.meta.get("end_ids", ()),
    )


def no_step(plan: Plan, reason: str, reporter: Reporter) -> ScoresOnly:
    """Note that the artifact will score text only; raise instead where it must generate."""
    if plan.task == "generate":
        raise NotUsableError(f"this model can't generate: {reason}", hint=ANOTHER_TASK)
    reporter.found([Finding("capture", "generation", False, why=reason)])
    return ScoresOnly(reason, by_model=True)
