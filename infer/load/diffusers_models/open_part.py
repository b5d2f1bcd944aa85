"""A model of a diffusers pipeline joined with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...distribution import install
from ...errors import NotUsableError, SourceError, UsageError
from ...library_errors import quiet
from ...named_inputs import NamedInputs
from ...plan import Plan
from ...regular_files import read_json
from ...spec import Finding, TensorSpec
from ...weights import Checkpoint, finite, num_bytes
from ..checkpoint.transformers_key_mapping import convert_names
from ..heads.build import build as build_model
from ..loaded_model import LoadedModel
from ..sources.diffusers_pipeline import AUTOENCODER, DENOISERS, OPENED, TEXT_ENCODERS, diffusers_class
from ..sources.state_dict_source import open_weights_only
from ..weight_loading.meta_model import build_on_meta, match_checkpoint
from ..weight_loading.tied_weights import keep_apart
from .part_inputs import Part, part_of

STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
ENDS = (".safetensors.index.json", ".safetensors", ".fp16.safetensors", ".bin")
LARGEST_BATCH = 63  # from 64 on diffusers' upsampling takes another way, and a graph holds one
# Attention of autoencoders in checkpoints of diffusers before 0.17.
OLD_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}


class PartModule(NamedInputs):
    """A model of diffusers, called by the names of its inputs."""

    def __init__(self, model: nn.Module, part: Part) -> None:
        super().__init__()
        self.model, self.part = model, part
        self.taking([spec.name for spec in part.inputs])

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.part.call(self.model, tensors)


def load_diffusers_part(plan: Plan) -> LoadedModel:
    """Open the folder of one model of a pipeline; raise `SourceError` for a class that is not known here.

    An autoencoder opens as its decoder, or as its encoder by `--key encoder`.
    """
    folder = Path(plan.source)
    kind = _known_class(folder)
    _check_key(plan, kind)
    config = read_json(folder / "config.json")
    _require("transformers" if kind in TEXT_ENCODERS else "diffusers", kind)
    part = part_of(kind, config, plan.key)

    def build() -> nn.Module:
        with quiet():
            made, _ = build_on_meta(lambda: _built(kind, folder, config, plan.key), kind)
        return made

    model = build()
    module, checkpoint = PartModule(model, part).eval(), _reader(folder)
    if kind in TEXT_ENCODERS:
        checkpoint = convert_names(checkpoint, model, str(folder))
    fit = match_checkpoint(module, checkpoint, _other_names)
    fit.check(str(folder), strict=False)
    apart = keep_apart(module, model, fit, checkpoint)
    findings = (
        Finding("load", "model of diffusers", kind, why=part.remark),
        Finding("load", "weights", num_bytes(checkpoint) / 1e6, "MB"),
    )
    positions = config.get("max_position_embeddings")
    longest = min(plan.max_length, positions) if isinstance(positions, int) else plan.max_length
    return LoadedModel(
        kind="diffusers",
        module=module,
        checkpoint=finite(checkpoint, str(folder)),
        inputs=part.inputs,
        outputs=part.outputs,
        sizes=_sizes(plan, part.inputs, longest),
        renames=fit.renames,
        weight_bytes=num_bytes(checkpoint, set(fit.found.values())),
        meta={"architecture": kind},
        findings=findings,
        rebuild=lambda: apart.untie(PartModule(build(), part).eval()),
    )


def _sizes(plan: Plan, inputs: tuple[TensorSpec, ...], longest: int) -> dict[str, tuple[int, int]]:
    """Return (smallest, largest) of the symbolic sizes of the inputs."""
    known = {"batch": (1, min(plan.max_batch, LARGEST_BATCH)), "seq": (1, longest)}
    return {name: bounds for name, bounds in known.items() if any(name in spec.shape for spec in inputs)}


def _known_class(folder: Path) -> str:
    kind = diffusers_class(folder / "config.json")
    if kind is None or kind not in OPENED:
        raise SourceError(
            f"a model of diffusers ({kind}); of its models {', '.join((*DENOISERS, AUTOENCODER))} are opened",
            where=str(folder),
            hint="Give --model file.py:build that makes it, with its .safetensors as the source",
        )
    return kind


def _check_key(plan: Plan, kind: str) -> None:
    allowed = ("encoder", "decoder") if kind == AUTOENCODER else ()
    if plan.key is not None and plan.key not in allowed:
        raise UsageError(
            f"{kind} has no part {plan.key!r}",
            where="--key",
            hint="An AutoencoderKL has encoder and decoder",
        )


def _require(library: str, kind: str) -> None:
    if find_spec(library) is None:
        extra = "hf" if library == "transformers" else "diffusers"
        raise NotUsableError(f"a {kind} needs the package {library}", hint=install(extra))


def _built(kind: str, folder: Path, config: dict[str, Any], key: str | None) -> nn.Module:
    if kind in TEXT_ENCODERS:
        return _text_encoder(kind, folder)
    import diffusers

    made: Any = getattr(diffusers, kind).from_config(config)
    if kind == AUTOENCODER:
        # Half of an autoencoder is never called.
        for name in ("decoder", "post_quant_conv") if key == "encoder" else ("encoder", "quant_conv"):
            setattr(made, name, None)
    found: nn.Module = made.eval()
    return found


def _text_encoder(kind: str, folder: Path) -> nn.Module:
    import transformers

    settings: Any = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    own = getattr(transformers, kind).config_class
    settings = settings if isinstance(settings, own) else own.from_pretrained(folder, local_files_only=True)
    return build_model(getattr(transformers, kind), settings)


def _reader(folder: Path) -> Checkpoint:
    path = next(
        (folder / f"{stem}{end}" for stem in STEMS for end in ENDS if (folder / f"{stem}{end}").is_file()),
        None,
    )
    if path is None:
        raise SourceError(
            f"the folder has no {STEMS[0]}.safetensors", where=str(folder), hint="Download it whole"
        )
    return open_weights_only(path)[0]


def _other_names(name: str) -> list[str]:
    inner = name.removeprefix("model.")
    old = next((inner.replace(new, was) for new, was in OLD_NAMES.items() if new in inner), inner)
    return [inner, f"text_model.{inner}", inner.removeprefix("text_model."), old]
