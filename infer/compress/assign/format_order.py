"""Order of formats by size, from the smallest one requested to float."""

from __future__ import annotations

from ...plan import Plan

# Nominal bits. Of formats with equal bits only the one with the least error is a rung.
NOMINAL_BITS = {"cluster:2": 2.3, "cluster:3": 3.3, "nf4": 4.25, "nf4:16": 4.6, "cluster:6": 6.3, "int8": 8.0}
OTHER_FOUR_BITS = {"": 4.3, "4": 4.3, "16": 4.65}  # by the option that follows the name


def smallest_format(bits: float | None) -> str:
    """Return the smallest format of a budget without --quant: 3 bits, or 2 for smaller budgets."""
    return "cluster:2" if bits is not None and bits < NOMINAL_BITS["cluster:3"] else "cluster:3"


def larger_formats(plan: Plan) -> list[str]:
    """List `plan.quant` and the larger formats in order of bits; float, always last, is not included."""
    if plan.quant_name in ("int8", "fp8"):
        return [plan.quant]
    bits = NOMINAL_BITS[plan.quant] if plan.quant in NOMINAL_BITS else OTHER_FOUR_BITS[plan.quant_option]
    return [plan.quant, *(name for name, more in NOMINAL_BITS.items() if more > bits)]


def fallback_formats(plan: Plan) -> list[str]:
    """List the formats before float for a layer that can't stay in `plan.quant`."""
    return [] if plan.quant_name in ("int8", "fp8") else ["int8"]
