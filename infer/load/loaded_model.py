"""Result of opening a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..paths import OwnedFolder
from ..spec import Finding, TensorSpec
from ..weights import Checkpoint

if TYPE_CHECKING:
    from .hf_preprocessor import Preprocessor


@dataclass(frozen=True)
class LoadedModel:
    """A model before optimization: what a source is, holds and says of itself.

    Parameters of `module` are on the meta device while `checkpoint` is set; `fill` gives them their values.
    """

    # "state-dict", "module", "torchscript", "exported", "safetensors", "huggingface", "gguf", "onnx", "openvino"
    kind: str
    module: nn.Module | None  # None for a file that runs as it is
    checkpoint: Checkpoint | None
    inputs: tuple[TensorSpec, ...]
    samples: Mapping[str, Tensor] = field(default_factory=dict)  # real inputs, batch first
    samples_from: str = ""  # "models/digits.py:example_inputs", "--data held_out.npz"
    ours: bool = False  # the samples were made here
    loose: tuple[TensorSpec, ...] = ()  # inputs and outputs without what is only guessed of their sizes
    loose_outputs: tuple[TensorSpec, ...] = ()
    uncertain: frozenset[str] = frozenset()  # symbolic sizes of `loose` that may be the batch, or not
    outputs: tuple[str, ...] = ()  # names, when the source knows them
    task: str = "tensors"  # or one of heads/table.py: "classification", "embedding", "text-generation", …
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # symbolic size → (smallest, largest)
    multiples: Mapping[str, int] = field(default_factory=dict)  # symbolic size → what divides it, where not 1
    renames: Mapping[str, str] = field(default_factory=dict)  # module's parameter name → name in `checkpoint`
    calibration: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # real inputs kept for calibration, or none
    training: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # more rows for --recover; none of them judges
    load: str = "meta"  # how `fill` gives the weights, "auto" resolved
    own_names: Checkpoint | None = None  # the weights by the names of their file, before those of the library
    file: Path | None = None  # that runs as it is: an ONNX file, an OpenVINO IR
    operator_seconds: dict[str, float] = field(
        default_factory=dict
    )  # of a call of an ONNX file, by type, once it was timed
    weight_bytes: int | None = None  # as the source stores them, where it has them on disk
    stored_as: str = (
        ""  # "gptq", "Q4_K 80 %, Q6_K 20 %": what the source is quantized to; empty for a float one
    )
    files: Mapping[str, Path] = field(default_factory=dict)  # name in the artifact → file to carry along
    meta: Mapping[str, Any] = field(default_factory=dict)  # JSON: pooling, max_length, labels, …
    preprocessor: Preprocessor | None = None  # of image or sound files
    # float32 [rows, bands, frames] → int64 [rows, tokens], for a speech-to-text decoder
    decode_greedily: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    findings: tuple[Finding, ...] = ()
    limitations: tuple[str, ...] = ()  # sentences of the verdict on what was given up
    directory: OwnedFolder | None = None  # of `files`, or of a `file` that was changed
    called: nn.Module | None = None  # what its user calls by keyword, where `module` was made of it
    rebuild: Callable[[], nn.Module] | None = (
        None  # the module anew, before `fill`, without opening the source
    )

    def saying(self, *findings: Finding) -> LoadedModel:
        """Return the model with more findings."""
        return replace(self, findings=(*self.findings, *findings))

    def limited(self, sentence: str) -> LoadedModel:
        """Return the model with one more sentence of the verdict on what was given up."""
        return replace(self, limitations=(*self.limitations, sentence))
