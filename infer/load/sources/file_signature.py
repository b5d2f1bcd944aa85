"""Inputs and outputs that a model file declares: their symbolic sizes by name, and which of these may be the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ... import rows
from ...errors import UsageError
from ...plan import Plan
from ...spec import BATCH, TensorSpec
from ..input_specs import asked_inputs
from ..loaded_model import LoadedModel

Specs = tuple[TensorSpec, ...]


def model_of_file(
    plan: Plan, kind: str, file: Path, inputs: Sequence[TensorSpec], outputs: Specs, named: Collection[str]
) -> LoadedModel:
    """Return the model of a file that runs as it is, from the inputs and outputs that it declares.

    `named`: symbolic sizes to which the file itself gives a name. Raises `UsageError` for a wrong --input.
    """
    asked = asked_inputs(plan)
    loose = _overridden(asked, inputs)
    one_row = rows.takes_one([spec.shape for spec in loose], [spec.shape for spec in outputs])
    if one_row:
        loose, outputs = rows.with_batch(loose), rows.with_batch(outputs)
    uncertain = _uncertain_sizes([spec for spec in loose if spec.name not in asked], named)
    given, made = _with_batch(loose, outputs, uncertain)
    return LoadedModel(
        kind=kind,
        module=None,
        checkpoint=None,
        inputs=given,
        loose=loose,
        loose_outputs=outputs,
        uncertain=uncertain,
        outputs=tuple(spec.name for spec in made),
        file=file,
        meta={"outputs": made},
        sizes={BATCH: (1, 1)} if one_row else {},
    )


def _overridden(asked: Mapping[str, TensorSpec], inputs: Sequence[TensorSpec]) -> Specs:
    """Return the inputs with those of --input in place of the file's; raise `UsageError` for one it does not have."""
    foreign = set(asked) - {spec.name for spec in inputs}
    if foreign:
        known = ", ".join(spec.name for spec in inputs)
        raise UsageError(
            f"the graph has no input {sorted(foreign)[0]!r}", where="--input", hint=f"Known: {known}"
        )
    return tuple(asked.get(spec.name, spec) for spec in inputs)


def _uncertain_sizes(inputs: Sequence[TensorSpec], named: Collection[str]) -> frozenset[str]:
    """Return the symbolic sizes of inputs that may be the batch: those that the file does not name, and `named` ones
    in front.
    """
    sure = any(spec.batched for spec in inputs)
    return frozenset(
        size
        for spec in inputs
        for axis, size in enumerate(spec.shape)
        if isinstance(size, str) and size != BATCH and (size not in named or (axis == 0 and not sure))
    )


def _with_batch(inputs: Specs, outputs: Specs, uncertain: frozenset[str]) -> tuple[Specs, Specs]:
    """Call the first sizes of inputs that nothing else is known of "batch", until they are tried.

    Of outputs those of the same name, and where they have none all.
    """
    named = {str(spec.shape[0]) for spec in inputs if spec.shape and spec.shape[0] in uncertain}
    own = {f"{spec.keyword}_0" for spec in inputs} & named
    first = own or (named if len(named) == 1 else set())

    def renamed(spec: TensorSpec, own: set[str]) -> TensorSpec:
        shape = tuple(BATCH if size in first | own else size for size in spec.shape)
        return TensorSpec(spec.name, spec.dtype, shape)

    given = tuple(renamed(spec, set()) for spec in inputs)
    nameless = {spec.name: {f"{spec.keyword}_0"} for spec in outputs}
    return given, tuple(renamed(spec, set(nameless[spec.name])) for spec in outputs)
