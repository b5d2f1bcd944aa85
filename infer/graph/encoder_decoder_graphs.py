"""Encoder and decoder step of one artifact: lowered one after the other, opened as one runner.

The encoder lies in the folder `encoder/` within that of the step, with a graph, weights and compiled form of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ..plan import Plan
from ..results import Lowered
from .program import ENCODER, Graph
from .storage import PROGRAM, SIGNATURE

PARTS = (SIGNATURE, PROGRAM, "weights")


def lower(backend: Any, graph: Graph, plan: Plan, folder: Path) -> Lowered:
    """Lower a graph and its parts, whose findings say of which they are."""
    done: Lowered = backend.lower(graph, plan, folder)
    for name, part in graph.parts.items():
        lowered: Lowered = backend.lower(part, plan, folder / name)
        named = [
            msgspec.structs.replace(finding, what=f"{name} {finding.what}") for finding in lowered.findings
        ]
        more_exact = tuple(dict.fromkeys(done.more_exact + lowered.more_exact))
        done = Lowered([*done.findings, *named], done.coverage, more_exact)
    return done


def refusal(backend: Any, graph: Graph, plan: Plan) -> str | None:
    """Return the reason why the backend can't lower a graph or one of its parts, or None."""
    reasons = (backend.refuses(each, plan) for each in (graph, *graph.parts.values()))
    return next((reason for reason in reasons if reason), None)


def open_runner(backend: Any, folder: Path, device: str) -> Any:
    """Open what `lower` wrote: a runner, of an encoder-decoder one of both graphs."""
    runner = backend.open(folder, device)
    if not (folder / ENCODER / SIGNATURE).exists():
        return runner
    return TwoGraphs(runner, backend.open(folder / ENCODER, device))


def links(folder: Path, place: Path) -> list[tuple[Path, Path]]:
    """List (target, link) of graph and weights of `folder` that `place` is to share; makes the folders of `place`."""
    places = [(folder, place)]
    if (folder / ENCODER).is_dir():
        (place / ENCODER).mkdir(exist_ok=True)
        places.append((folder / ENCODER, place / ENCODER))
    return [(source / name, to / name) for source, to in places for name in PARTS]


class TwoGraphs:
    """Runner of both graphs: inputs with `token_ids` are those of a decoder's step, others those of the encoder."""

    def __init__(self, step: Any, encoder: Any) -> None:
        self.step, self.encoder = step, encoder
        self.inputs, self.outputs = step.inputs, step.outputs

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        outputs: Mapping[str, Tensor] = (self.step if "token_ids" in inputs else self.encoder).run(inputs)
        return outputs

    def close(self) -> None:
        self.step.close()
        self.encoder.close()
