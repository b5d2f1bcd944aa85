"""KServe requests that came in one turn of the loop and differ in their numbers alone: read and queued together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import forms
from .engine import Engine
from .forms import Form
from .heads import Known
from .outputs import SPLIT
from .party import Group

if TYPE_CHECKING:
    from .express import Express
    from .service import Service


def together(service: Service, requests: Sequence[Express]) -> list[Express]:
    """Begin those that can be; the rest is to go alone, and is told there what is wrong with it."""
    alone: list[Express] = []
    engines: dict[Known, Engine | None] = {}
    alikes: dict[tuple[Form, float, str], tuple[list[Express], list[bytes]]] = {}
    for request in requests:
        known = request.known
        if known not in engines:
            engines[known] = _engine(service, known)
        engine = engines[known]
        found = None
        if engine is not None:
            split, most = known.headers.get(SPLIT), engine.limits.max_json_bytes
            found = forms.find(request.body, split, engine.forms, most)
        if found is None:
            alone.append(request)
            continue
        form, numbers = found
        same = alikes.setdefault((form, min(form.timeout, known.timeout), known.tenant), ([], []))
        same[0].append(request)
        same[1].append(numbers)
    for (form, timeout, tenant), (alike, numbers_of) in alikes.items():
        engine = engines[alike[0].known]
        if engine is None:
            continue
        most = max(engine.batcher.max_batch // form.rows, 1)
        for at in range(0, len(alike), most):
            some = alike[at : at + most]
            if not _begin(engine, form, some, numbers_of[at : at + most], timeout, tenant):
                alone += some
    return alone


def _engine(service: Service, known: Known) -> Engine | None:
    engine = service.engines.get(known.path["model"])
    if engine is None or known.path.get("version", engine.predictor.version) != engine.predictor.version:
        return None
    return engine


def _begin(
    engine: Engine,
    form: Form,
    requests: list[Express],
    numbers: list[bytes],
    timeout: float,
    tenant: str,
) -> bool:
    arrays = forms.read(form, numbers)
    if arrays is None:
        return False
    group = Group(engine, form, requests, timeout)
    if engine.enter(group.parties[0], arrays, form, timeout, tenant):
        return True
    group.dissolve()
    return False
