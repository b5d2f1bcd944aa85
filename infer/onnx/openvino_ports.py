"""Inputs and outputs of an OpenVINO model by the names of a signature; imported without torch, and without openvino."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def input_places(model: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the places of the inputs that a model reads; one without a name has that of its layer."""
    places = {
        name: place
        for place, port in enumerate(model.inputs)
        for name in port.get_names() or {str(port.get_node().get_friendly_name())}
    }
    return {name: places[name] for name in names if name in places}


def output_places(model: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the places of outputs; one without a name is numbered, else a signature has the order of the model."""
    places = {f"output_{place}": place for place in range(len(model.outputs))}
    places |= {name: place for place, port in enumerate(model.outputs) for name in port.get_names()}
    return {name: places.get(name, index) for index, name in enumerate(names)}
