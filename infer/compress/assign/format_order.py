"""Order of formats by size, from the smallest one requested to float."""

from __future__ import annotations

from ...plan import Plan

# Nominal bits. Of formats with equal bits only the one with the least error is a rung.
RUNGS = {"cluster:2": 2.3, "cluster:3": 3.3, "nf4": 4.25, "nf4:16": 4.6, "cluster:6": 6.3, "int8": 8.0}
OTHER_FOUR_BITS = {"": 4.3, "4": 4.3, "16": 4.65}  # by the option that follows the name


def smallest(bits: float | None) -> str:
    """Return the smallest format of a budget without --quant: 3 bits, or 2 for smaller budgets."""
    return "cluster:2" if bits is not None and bits < RUNGS["cluster:3"] else "cluster:3"


def ladder(plan: Plan) -> list[str]:
    """List `plan.quant` and the larger formats in order of bits; float, always last, is not included."""
    if plan.quant_name in ("int8", "fp8"):
        return [plan.quant]
    bits = RUNGS[plan.quant] if plan.quant in RUNGS else OTHER_FOUR_BITS[plan.quant_option]
    return [plan.quant, *(name for name, more in RUNGS.items() if more > bits)]


def rungs(plan: Plan) -> list[str]:
    """List the formats before float for a layer that can't stay in `plan.quant`."""
    return [] if plan.quant_name in ("int8", "fp8") else ["int8"]
