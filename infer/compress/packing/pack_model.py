"""Quantization of a model: each layer that its format accepts is replaced by a packed one.

Weights on the meta device are read, quantized and dropped in blocks of rows, so a checkpoint of any size
needs memory for its packed form and for one block. What isn't quantized stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

from torch import Tensor, nn

from ... import device as hardware
from ...errors import NotUsableError, UsageError
from ...plan import Plan
from ...results import LayerResult
from ...weights import Checkpoint
from ..calibration.expert_statistics import ExpertStats
from ..layer_kinds import NAMES, is_looked_up
from ..layer_overrides import FLOAT, Format, find_with_formats
from ..packed_layers import replacement
from ..packed_weight import Packed
from ..quantizable_layers import NamedLayer, Weight
from ..quantizer import Stats, join, needs_stats
from .carried_codes import SourceCodes, SquaredError, carried, carries, stored_in_float
from .packing_result import PackingCache, PackingResult, QuantizationResult, Totals
from .row_source import RowSource, row_source_of

Progress = Callable[[int, int, str], None]


def quantize_model(
    model: nn.Module,
    plan: Plan,
    *,
    checkpoint: Checkpoint | None = None,
    renames: Mapping[str, str] | None = None,
    stats: Mapping[str, Stats] | None = None,
    progress: Progress | None = None,
    formats: Mapping[str, str] | None = None,
    packing_cache: PackingCache | None = None,
) -> QuantizationResult:
    """Swap in place all layers that their format accepts; weights on meta are read through `checkpoint`.

    `formats` holds layer → format ("float" keeps it); the others get `plan.quant`.
    Raises `UsageError` (unknown option, no calibration), `SourceError` (a weight is absent or not finite) and
    `NotUsableError` (no layer accepts the format).
    """
    formats, calibrated, packing_cache = formats or {}, stats or {}, packing_cache or PackingCache(room=0)
    if stats is None:
        _refuse_calibrated_formats(plan, formats)

    def reason(site: NamedLayer, format: Format) -> str | None:
        said = refuses(site, format, calibrated)
        return said or (stored_in_float(site, checkpoint, renames) if carries(format) else None)

    weights = find_with_formats(model, plan, formats, reason)
    accepted = [(weight, format) for weight, format in weights if format is not None]
    refused = {name: reason for weight, _ in weights for name, reason in weight.reasons.items()}
    if not accepted:
        reasons = "; ".join(f"refused {name}: {reason}" for name, reason in list(refused.items())[:3])
        reasons = reasons or f"it has no {NAMES}"
        raise NotUsableError(
            f"no layer of this model can be {plan.quant} ({reasons})",
            hint="Use --quant none, or another format",
        )
    layers, sources, totals = list[LayerResult](), list[SourceCodes](), Totals()
    for done, (weight, format) in enumerate(accepted):
        if progress:
            progress(done, len(accepted), weight.name)
        origin = row_source_of(weight, checkpoint, renames or {})
        with hardware.mmap_large_blocks() if weight.tensor.is_meta else nullcontext():
            make = partial(pack, origin, weight, format, calibrated)
            packing = make() if carries(format) else packing_cache.get(weight, format, make)
        sources += [packing.source] if packing.source is not None else []
        layers += _swap(weight, origin, format, packing, totals)
    if progress:
        progress(len(accepted), len(accepted), "")
    _disable_fast_paths(model)
    return QuantizationResult(tuple(layers), refused, totals, tuple(sources))


def _refuse_calibrated_formats(plan: Plan, formats: Mapping[str, str]) -> None:
    for name in {plan.quant, *formats.values()} - {FLOAT}:
        if needs_stats(plan.with_(quant=name)):
            raise UsageError(
                f"--quant {name} needs real inputs to calibrate with", hint="Give them with --data"
            )


def refuses(site: NamedLayer, format: Format, stats: Mapping[str, Stats]) -> str | None:
    """Return the reason why a layer can't have a format, or None."""
    if reason := format.quantizer.refuses(site.layer, format.plan):
        return reason
    reached = is_looked_up(site.layer) or _stats(site, stats) is not None
    return None if reached or not needs_stats(format.plan) else "no calibration input reached it"


def _stats(site: NamedLayer, stats: Mapping[str, Stats]) -> Stats | None:
    return next((stats[name] for name in site.names if name in stats), None)


def pack(origin: RowSource, weight: Weight, format: Format, stats: Mapping[str, Stats]) -> PackingResult:
    """Quantize one weight, block by block."""
    seen = next((found for site in weight.sites if (found := _stats(site, stats)) is not None), None)
    parts, error = list[dict[str, Tensor]](), SquaredError()
    codes = origin.codes if carries(format) else None
    for start, block in origin.blocks(format.quantizer.ROWS):
        if codes is not None and not codes.refused:
            part = carried(codes, start, start + len(block))
            decoded = format.quantizer.dequantize(part).to(codes.dtype).float()
        else:
            own = seen
            if isinstance(seen, ExpertStats):
                own = None if needs_stats(format.plan) else seen.of(start // (origin.rows_of_expert or 1))
            elif getattr(seen, "is_lookup", False) and needs_stats(format.plan):
                own = None  # an embedding has no activations to find steps for
            part = format.quantizer.quantize(block, own, format.plan)
            decoded = format.quantizer.dequantize(part).reshape(block.shape)
        error.add(decoded.sub_(block), block)
        parts.append(part)
    source = None if codes is None else SourceCodes(weight.name, codes.kind, codes.refused, error)
    return PackingResult(join(format.quantizer, parts), error, source)


def packed_layers(weight: Weight, format: Format, packing: PackingResult) -> list[nn.Module]:
    """Build the replacements of all layers of a weight; they share one `Packed`."""
    packed = Packed(packing.tensors, format.quantizer.dequantize, weight.tensor.dtype, format.name)
    if not weight.tensor.is_meta:
        packed.to(weight.tensor.device)
    return [
        replacement(site.layer, packed, format.quantizer).train(site.layer.training) for site in weight.sites
    ]


def _swap(
    weight: Weight, origin: RowSource, format: Format, packing: PackingResult, totals: Totals
) -> list[LayerResult]:
    count, done = weight.tensor.numel(), []
    bits = packing.num_bytes * 8 / count
    for site, new in zip(weight.sites, packed_layers(weight, format, packing), strict=True):
        for parent, attribute in site.parents:
            setattr(parent, attribute, new)
        tied_to = weight.name if site is not weight.sites[0] else ""
        done.append(LayerResult(site.name, format.name, bits, packing.error.relative, tied_to))
    totals.num_layers += len(weight.sites)
    totals.num_weights += count
    totals.bytes_before += count * origin.dtype.itemsize
    totals.bytes_after += packing.num_bytes
    totals.error += packing.error
    return done


def _disable_fast_paths(model: nn.Module) -> None:
    """Disable torch's fused encoder path, which would decode `linear1.weight` at every call."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
