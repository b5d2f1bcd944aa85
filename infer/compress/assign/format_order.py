"""Order of formats by size, from the smallest one requested to float."""

from __future__ import annotations

from ...fidelity.thresholds import precision_class
from ...plan import Plan

HALF = "fp16"  # the last format before float, of half its bytes
# Nominal bits. Of formats with equal bits only the one with the least error is a rung.
NOMINAL_BITS = {
    "cluster:2": 2.3,
    "cluster:3": 3.3,
    "nf4": 4.25,
    "nf4:16": 4.6,
    "cluster:6": 6.3,
    "int8": 8.0,
    HALF: 16.0,
}
FINE_BITS = 4.65  # of the other formats of 4 bits with a scale for each 16 weights
CLASS_BITS = {
    "int8": 8.0,
    "4bit": 4.3,
    "3bit": 3.3,
    "2bit": 2.3,
}  # of other formats, by their precision class
_OF_8_BITS = ("int8", "fp8", "keep")  # formats whose layers take 16 bits next where they lose too much


def smallest_format(bits: float | None) -> str:
    """Return the smallest format of a budget without --quant: 3 bits, or 2 for smaller budgets."""
    return "cluster:2" if bits is not None and bits < NOMINAL_BITS["cluster:3"] else "cluster:3"


def larger_formats(plan: Plan) -> list[str]:
    """List `plan.quant` and the larger formats in order of bits; float, always last, is not included."""
    if plan.quant_name == HALF:
        return [HALF]
    if plan.quant_name in _OF_8_BITS:
        return [plan.quant, HALF]
    known = precision_class(plan.quant, "float32")
    bits = FINE_BITS if (known, plan.quant_option) == ("4bit", "16") else CLASS_BITS.get(known, 4.3)
    bits = NOMINAL_BITS.get(plan.quant, bits)
    return [plan.quant, *(name for name, more in NOMINAL_BITS.items() if more > bits)]


def fallback_formats(plan: Plan) -> list[str]:
    """List the formats before float for a layer that can't stay in `plan.quant`."""
    if plan.quant_name == HALF:
        return []
    return [HALF] if plan.quant_name in _OF_8_BITS else ["int8", HALF]
