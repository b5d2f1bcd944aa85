"""`infer.optimize`: a file, a name or a module to an artifact, from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UsageError
from ..options import from_values
from ..plan import Plan
from ..reporter import Reporter
from ..run import stages
from ..run.publish import Outcome
from .compile import compile as compile_model


def optimize(
    source: Plan | str | Path | nn.Module,
    output: str | Path,
    *,
    data: Any = None,
    select: Callable[[Any], Any] | None = None,
    reporter: Reporter | None = None,
    replace: bool = False,
    **options: Any,
) -> Outcome:
    """Optimize a model, check it against the original and publish the artifact `output`.

        infer.optimize("model.onnx", "model.infer", quant="int8")
        infer.optimize(module, "module.infer", data=loader)
        infer.optimize(Plan(source="model.pt", trust_code=True), "model.infer")

    - `source`: a path or name as `infer optimize` takes it, a module, or a `Plan`, which has all options.
    - `data`: of a file what `--data` names; of a module its calls, and with `select`, as `infer.compile` takes them.
    - `options`: those of `infer optimize`, by the names of `Plan`.
    - `reporter` receives progress and findings; `replace` overwrites an artifact.

    Nothing is published when this raises:

    - `UsageError`: an option is wrong, or options exclude each other.
    - `SourceError`, `UnsafeSourceError`: the model file is damaged, or holds code and `trust_code` is not set.
    - `GateError`: less faithful than the limits of the precision class, slower than the fastest float form, or of no
      gain: neither faster nor smaller than what the user has.
    - `NotUsableError`: this machine or this model can't run with the backend, format or device asked for.
    - `BusyError`: the output exists, or another process writes it.
    - `ResourceError`: out of memory or disk.
    """
    if isinstance(source, nn.Module):
        with_output = compile_model(
            source, data, output=output, select=select, replace=replace, reporter=reporter, **options
        )
        variant = with_output.variants[0]
        manifest = variant.predictor.manifest
        with_output.close()
        return Outcome(Path(output), manifest, variant.report)
    if select is not None:
        raise UsageError("rows are selected of a module's data", where="select", hint="Leave it out")
    if isinstance(source, Plan):
        if options or data is not None:
            raise UsageError("a Plan has all options", hint="plan.with_(quant=...) changes them")
        return stages.optimize(source, Path(output), reporter=reporter, replace=replace)
    plan = from_values(Plan, {"source": str(source), "data": data, **options}, where="infer.optimize")
    return stages.optimize(plan, Path(output), reporter=reporter, replace=replace)
