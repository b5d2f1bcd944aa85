"""Codes of a stack of experts, from those of each expert's projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...weights import StoredCodes

_NUMBERS = 1 << 24  # rows of one projection at most: the next one's numbers begin here
Tensors = dict[str, Tensor]


def stack_codes(
    experts: Sequence[Sequence[StoredCodes]], convert: Callable[[list[Tensor]], Tensor]
) -> StoredCodes:
    """Return the rows of all experts, one expert after another, as `convert` places those of its projections.

    `convert` maps the projections of one expert, each [rows, K], to its weight [N, K]; it is run on row numbers.
    """
    first = experts[0]
    kind = first[0].kind
    every = [codes for own in experts for codes in own]
    refused = next((codes.refused for codes in every if codes.refused), "")
    if refused:
        return StoredCodes.without(kind, refused)
    if len({(codes.kind, codes.shape[1]) for codes in every}) > 1:
        return StoredCodes.without(kind, "its experts are stored in several forms")
    if any(codes.order is not None for codes in every):
        return StoredCodes.without(
            kind, "the columns of its experts are sorted by group, each in its own order"
        )
    numbers = [
        (torch.arange(codes.shape[0], dtype=torch.float64) + _NUMBERS * i)[:, None].expand(-1, 2).clone()
        for i, codes in enumerate(first)
    ]
    placed = convert(numbers)
    if placed.shape != (sum(map(len, numbers)), 2) or not torch.equal(placed[:, 0], placed[:, 1]):
        return StoredCodes.without(kind, "transformers stores its experts by columns")
    samples = [codes.rows(0, 1) for codes in every]
    common = _common_form(samples)
    if common is None:
        return StoredCodes.without(kind, "its experts are stored in several forms")
    starts = torch.tensor([0, *(len(one) for one in numbers)]).cumsum(0)
    place = placed[:, 0].long()
    order = starts[place // _NUMBERS] + place % _NUMBERS
    count = len(order)

    def rows(start: int, stop: int) -> Tensors:
        parts = []
        for e in range(start // count, -(-stop // count)):
            own = [_in_form(codes.rows(0, codes.shape[0]), common) for codes in experts[e]]
            wanted = order[max(start - e * count, 0) : stop - e * count]
            parts.append({k: v if k == "table" else v[wanted] for k, v in _joined(own).items()})
        return _joined(parts)

    return StoredCodes(kind, (count * len(experts), first[0].shape[1]), rows, first[0].dtype, experts=True)


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """Return rows of one form behind one another; they share a table."""
    return {k: v if k == "table" else torch.cat([one[k] for one in parts]) for k, v in parts[0].items()}


def _common_form(samples: Sequence[Tensors]) -> Tensors | None:
    """Return a row in the form that the rows of all experts can take, None where there is none.

    Integer codes with one zero point have it in their table, those with several in an int8 minimum beside a table that
    begins at 0 (`quantized_weights.group_codes`): experts of both kinds share one table and have minima.
    """
    with_minimum = next((one for one in samples if "minimum" in one), None)
    form = samples[0] if with_minimum is None else with_minimum
    same_table = all(_shift(one, form) == 0 for one in samples)
    if with_minimum is None and not same_table:
        form = {**form, "minimum": torch.zeros_like(form["scale"], dtype=torch.int8)}
    steps = form.get("minimum", form["scale"]).dtype == torch.int8 and "super_minimum" not in form
    for one in samples:
        moved = _shift(one, form)
        lacks = "minimum" in form and "minimum" not in one
        alike = {k: v.dtype for k, v in one.items()} == {k: form[k].dtype for k in one if k in form}
        if moved is None or not alike or (moved and not steps) or set(form) - set(one) - {"minimum"}:
            return None
        if lacks and "super_minimum" in form:
            return None
    return form


def _shift(one: Tensors, form: Tensors) -> int | None:
    """Return the number by which a table exceeds that of a form, in all its values; None where there is no such one."""
    if "table" not in one or "table" not in form:
        return 0 if ("table" in one) == ("table" in form) else None
    if one["table"].shape != form["table"].shape:
        return None
    moved = one["table"] - form["table"]
    step = int(moved.flatten()[0])
    return step if bool((moved == step).all()) and abs(step) < 64 else None


def _in_form(own: Tensors, form: Tensors) -> Tensors:
    """Return the rows of one projection in the form: its table, and what it exceeds it by in the minimum."""
    if "minimum" not in form:
        return own
    minimum = own.get("minimum")
    if minimum is None:
        minimum = torch.zeros(own["scale"].shape, dtype=form["minimum"].dtype)
    found = {**own, "minimum": minimum + (_shift(own, form) or 0)}
    return {**found, "table": form["table"]} if "table" in form else found
