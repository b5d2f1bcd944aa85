"""Which formats a layer may have, from the smallest that was asked for to float."""

from __future__ import annotations

from ...plan import Plan

# Nominal bits. Of formats with equal bits only the one with the least error is a rung.
RUNGS = {"cluster:2": 2.3, "cluster:3": 3.3, "nf4": 4.25, "nf4:16": 4.6, "cluster:6": 6.3, "int8": 8.0}
OTHER_FOUR_BITS = {"": 4.3, "4": 4.3, "16": 4.65}  # by the option that follows the name


def smallest(bits: float | None) -> str:
    """The lowest rung of a budget that came without --quant: 3 bits; 2 where fewer are asked for."""
    return "cluster:2" if bits is not None and bits < RUNGS["cluster:3"] else "cluster:3"


def ladder(plan: Plan) -> list[str]:
    """`plan.quant` and what is larger, in order of bits; float, always the last, is not in it."""
    if plan.quant_name in ("int8", "fp8"):
        return [plan.quant]
    bits = RUNGS[plan.quant] if plan.quant in RUNGS else OTHER_FOUR_BITS[plan.quant_option]
    return [plan.quant, *(name for name, more in RUNGS.items() if more > bits)]


def rungs(plan: Plan) -> list[str]:
    """Where a layer goes that can't stay in `plan.quant`, before float."""
    return [] if plan.quant_name in ("int8", "fp8") else ["int8"]
