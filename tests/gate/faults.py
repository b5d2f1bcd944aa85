"""Table of faults: a function each, which turns the right answer of a call into a wrong one, and what it stands for.

`@fault(kind, reason, subjects, quants)` adds one function. `harmless` are differences that no user would call wrong,
and that have to pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gate.planted import Call, Change, Tensors
from tests.gate.subjects import MAX_BATCH, MAX_LENGTH, SUBJECTS

FLOAT = ("none",)
QUANTIZED = ("none", "nf4")
ALL = ("none", "int8", "nf4")


@dataclass(frozen=True)
class Fault:
    """One way to be wrong, or, if harmless, to differ without being wrong."""

    name: str
    kind: str
    why: str
    change: Change
    subjects: tuple[str, ...]
    quants: tuple[str, ...]


FAULTS: list[Fault] = []
HARMLESS: list[Fault] = []


def fault(kind: str, why: str, subjects: str, quants: tuple[str, ...] = FLOAT) -> Callable[[Change], Change]:
    """Add a fault to the table, for each of the subjects and formats."""

    def add(change: Change) -> Change:
        FAULTS.append(Fault(change.__name__, kind, why, change, tuple(subjects.split()), quants))
        return change

    return add


def harmless(kind: str, why: str, subjects: str) -> Callable[[Change], Change]:
    """Add a difference that has to pass."""

    def add(change: Change) -> Change:
        HARMLESS.append(Fault(change.__name__, kind, why, change, tuple(subjects.split()), FLOAT))
        return change

    return add


VECTORS = "mlp digits detector keypoints units embedding"
IMAGES = "cnn segmenter upscaler"
SEQUENCES = "lstm carried encoder"
EVERY = f"{VECTORS} {IMAGES} {SEQUENCES}"


# Rows


@fault(
    "swapped rows", "The first two rows of a batch get each other's answers.", "mlp segmenter lstm embedding"
)
def rows_swapped(call: Call) -> Tensors:
    order = [1, 0, *range(2, call.batch)] if call.batch > 1 else [0]
    return {name: value[order] for name, value in call.outputs.items()}


@fault(
    "swapped rows", "Each row gets the answer of the row before it.", "detector keypoints carried", QUANTIZED
)
def rows_rolled(call: Call) -> Tensors:
    return {name: value.roll(1, 0) for name, value in call.outputs.items()}


@fault(
    "swapped rows",
    "A batch is answered from its end, as by a kernel with a negative stride.",
    "mlp units flags",
)
def rows_reversed(call: Call) -> Tensors:
    return {name: value.flip(0) for name, value in call.outputs.items()}


@fault("swapped rows", "Every row gets the answer of the first, as by a stride of zero.", "digits embedding")
def first_row_for_all(call: Call) -> Tensors:
    return {name: value[:1].expand_as(value).clone() for name, value in call.outputs.items()}


@fault("off by one", "A loop over the rows ends one early.", "mlp cnn encoder units")
def last_row_is_zero(call: Call) -> Tensors:
    call.main[-1] = 0
    return call.outputs


@fault("off by one", "The last row of several is that before it.", "detector lstm")
def last_row_repeats(call: Call) -> Tensors:
    if call.batch > 1:
        call.main[-1] = call.main[-2]
    return call.outputs


@fault("off by one", "A loop over positions ends one early.", "lstm encoder upscaler segmenter")
def last_position_is_zero(call: Call) -> Tensors:
    axis = call.subject.time
    if call.main.shape[axis] > 1:
        call.main.narrow(axis, call.main.shape[axis] - 1, 1).zero_()
    return call.outputs


@fault("off by one", "Position t holds the answer of t - 1.", "lstm carried segmenter detector")
def positions_shifted(call: Call) -> Tensors:
    return call.with_(call.main.roll(1, call.subject.time))


@fault("off by one", "Column c holds the answer of c - 1.", "mlp plain wide", QUANTIZED)
def columns_shifted(call: Call) -> Tensors:
    return call.with_(call.main.roll(1, call.subject.column))


@fault("one row wrong", "Two rows of a rare kind among 256 have the other sign.", EVERY)
def special_rows_negated(call: Call) -> Tensors:
    return call.with_(torch.where(_over(call.special, call.main), -call.main, call.main))


@fault(
    "one row wrong",
    "Two rows of a rare kind have the other sign, at few bits: the mean over rows hardly moves.",
    "plain wide detector keypoints units embedding",
    ("int8", "nf4"),
)
def special_rows_negated_quantized(call: Call) -> Tensors:
    return special_rows_negated(call)


@fault(
    "one row wrong",
    "Rows of a rare kind get the answer of the next row, or of none.",
    "mlp wide segmenter lstm units",
    QUANTIZED,
)
def special_rows_of_another(call: Call) -> Tensors:
    other = call.main.roll(1, 0) if call.batch > 1 else torch.zeros_like(call.main)
    return call.with_(torch.where(_over(call.special, call.main), other, call.main))


@fault(
    "one row wrong",
    "Rows of a rare kind are off by a tenth: far beyond rounding, far below the mean's notice.",
    "wide detector",
)
def special_rows_a_tenth_off(call: Call) -> Tensors:
    return call.with_(torch.where(_over(call.special, call.main), 1.1 * call.main, call.main))


@fault("NaN or infinity", "One number of a rare kind of row is NaN.", EVERY)
def nan_in_special_rows(call: Call) -> Tensors:
    call.column[call.special] = float("nan")
    return call.outputs


@fault(
    "NaN or infinity",
    "One number of a rare kind of row is infinite.",
    "mlp segmenter lstm embedding",
    ("none", "int8", "nf4"),
)
def infinity_in_special_rows(call: Call) -> Tensors:
    call.column[call.special] = float("inf")
    return call.outputs


@fault("NaN or infinity", "A batch of one row is NaN: a variance over one row.", "plain detector")
def nan_everywhere_at_one_row(call: Call) -> Tensors:
    return call.with_(call.main * float("nan")) if call.batch == 1 else call.outputs


# Slices


SLICED = "plain digits detector detector_last keypoints segmenter upscaler lstm encoder units spectrum"


@fault("one slice wrong", "One channel, class, point or unit is zero.", SLICED)
def column_zeroed(call: Call) -> Tensors:
    call.column.zero_()
    return call.outputs


@fault(
    "one slice wrong",
    "One channel, class or unit always has its mean: a constant is no answer.",
    "detector keypoints units spectrum wide lstm encoder",
    ("int8", "nf4"),
)
def column_constant(call: Call) -> Tensors:
    mean = call.memory.setdefault("mean", _column(call).mean(0))
    call.column.copy_(mean.expand_as(call.column) if mean.shape == call.column.shape[1:] else mean.mean())
    return call.outputs


@fault(
    "one slice wrong",
    "One channel, class or unit deviates to the other side of its mean.",
    "detector_last keypoints units spectrum masked",
    QUANTIZED,
)
def column_negated(call: Call) -> Tensors:
    mean = call.memory.setdefault("mean", _column(call).mean())
    call.column.copy_(2 * mean - call.column)
    return call.outputs


@fault(
    "one slice wrong",
    "One column holds the answers of other rows.",
    "wide detector segmenter encoder spectrum",
    QUANTIZED,
)
def column_of_other_rows(call: Call) -> Tensors:
    call.column.copy_(call.column.roll(1, 0) if call.batch > 1 else -call.column)
    return call.outputs


@fault(
    "one slice wrong",
    "One column, a share, is rounded to 8 levels.",
    "detector detector_last units keypoints",
)
def column_rounded(call: Call) -> Tensors:
    call.column.copy_((call.column * 7).round() / 7)
    return call.outputs


@fault(
    "one slice wrong", "Two columns stand in each other's place.", "plain wide digits segmenter", QUANTIZED
)
def columns_exchanged(call: Call) -> Tensors:
    order = list(range(call.main.shape[call.subject.column]))
    order[0], order[call.subject.index] = order[call.subject.index], order[0]
    return call.with_(call.main[(slice(None),) * call.subject.column + (order,)])


@fault("one slice wrong", "An output of thousandths beside one of hundreds is zero.", "several")
def small_output_zeroed(call: Call) -> Tensors:
    return {**call.outputs, "small": call.outputs["small"] * 0}


@fault(
    "one slice wrong", "The output that is no logits holds the answers of other rows.", "several", QUANTIZED
)
def second_output_of_other_rows(call: Call) -> Tensors:
    other = call.outputs["second"]
    return {**call.outputs, "second": other.roll(1, 0) if call.batch > 1 else -other}


@fault("one slice wrong", "One point of seventeen lies where another one does.", "keypoints")
def one_point_wrong(call: Call) -> Tensors:
    call.main[:, 5] = call.main[:, 6]
    return call.outputs


@fault(
    "one slice wrong",
    "What lies at the border of the image is not seen: a padding of the wrong side.",
    "segmenter upscaler cnn",
)
def border_is_zero(call: Call) -> Tensors:
    name = next(iter(call.inputs))
    given = call.inputs[name].clone()
    given[..., :1] = 0
    return call.right({**call.inputs, name: given})


# Sizes


def _at_batch(size: int) -> Change:
    def change(call: Call) -> Tensors:
        return {n: -v if v.is_floating_point() else 1 - v.long() for n, v in call.outputs.items()} \
            if call.batch == size else call.outputs  # fmt: skip

    change.__name__ = f"wrong_at_batch_{size}"
    return change


ONE_SIZE = "Right at other batch sizes, wrong at one that has a kernel of its own."
for _size in (1, 2, 3, 8):
    fault("batch size", ONE_SIZE, "plain lstm" if _size == 2 else "mlp segmenter encoder")(_at_batch(_size))
fault("batch size", ONE_SIZE, "plain detector embedding", QUANTIZED)(_at_batch(MAX_BATCH))


@fault("batch size", "A norm in training mode: rows are normalized by their batch.", "plain embedding")
def statistics_of_the_batch(call: Call) -> Tensors:
    y = call.main
    return call.with_((y - y.mean(0)) / (y.std(0, unbiased=False) + 1e-5) * y.abs().mean())


@fault(
    "length", "Wrong at the greatest length that is allowed, right at those of the data.", "encoder embedding"
)
def wrong_at_longest(call: Call) -> Tensors:
    return call.with_(-call.main) if _length(call) == MAX_LENGTH else call.outputs


@fault("length", "Wrong at one token or step: a kernel that takes it for a vector.", "encoder embedding")
def wrong_at_one(call: Call) -> Tensors:
    return call.with_(-call.main) if _length(call) == 1 else call.outputs


@fault("late positions", "Positions behind the fortieth are zero; the rows of data are shorter.", "encoder")
def wrong_beyond_the_data(call: Call) -> Tensors:
    call.main[:, 40:] = 0
    return call.outputs


@fault("late positions", "The last quarter of the positions is zero.", "lstm carried detector encoder")
def late_positions_are_zero(call: Call) -> Tensors:
    length = call.main.shape[call.subject.time]
    call.main.narrow(call.subject.time, length - length // 4, length // 4).zero_()
    return call.outputs


@fault("late positions", "Errors add up from step to step.", "lstm carried", QUANTIZED)
def drift(call: Call) -> Tensors:
    steps = torch.arange(call.main.shape[1]) / call.main.shape[1]
    return call.with_(call.main * (1 - 2 * steps[:, None]))


# State


@fault(
    "stale state", "The output buffer of the call before is returned.", "plain detector lstm embedding flags"
)
def answer_of_the_call_before(call: Call) -> Tensors:
    key = tuple(call.main.shape)
    before = call.memory.get(key, call.outputs)
    call.memory[key] = call.outputs
    return before


@fault("stale state", "The first answer of a shape is returned for ever.", "digits segmenter")
def answer_kept_for_ever(call: Call) -> Tensors:
    return call.memory.setdefault(tuple(call.main.shape), call.outputs)  # type: ignore[no-any-return]


@fault("stale state", "The state that the caller carries is taken for zero.", "carried", QUANTIZED)
def state_not_read(call: Call) -> Tensors:
    return call.right({**call.inputs, "state": torch.zeros_like(call.inputs["state"])})


@fault("stale state", "The state comes back as it was given.", "carried")
def state_returned_unchanged(call: Call) -> Tensors:
    return {**call.outputs, "next_state": call.inputs["state"]}


@fault("stale state", "The state returned lacks the last step.", "carried")
def state_of_one_step_before(call: Call) -> Tensors:
    x = call.inputs["x"]
    short = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return {**call.outputs, "next_state": call.right({**call.inputs, "x": short})["next_state"]}


@fault("stale state", "The state of the call before is added to that given.", "carried")
def state_not_reset(call: Call) -> Tensors:
    before = call.memory.get(call.batch, torch.zeros_like(call.inputs["state"]))
    call.memory[call.batch] = call.outputs["next_state"]
    return call.right({**call.inputs, "state": call.inputs["state"] + before})


@fault("stale state", "The state grows a little at each call: one call is within the limits.", "integrator")
def state_drifts(call: Call) -> Tensors:
    return {**call.outputs, "next_state": call.outputs["next_state"] * 1.0009}


@fault("stale state", "A sequence longer than a tile begins again without its past.", "lstm")
def state_starts_anew_in_the_middle(call: Call) -> Tensors:
    x = call.inputs["x"]
    if x.shape[1] < 16:
        return call.outputs
    parts = [call.right({"x": part})["y"] for part in (x[:, :12], x[:, 12:])]
    return call.with_(torch.cat(parts, 1))


@fault("stale state", "Every tenth call answers wrongly: a buffer that is freed too early.", "plain")
def slow_corruption(call: Call) -> Tensors:
    call.memory["calls"] = call.memory.get("calls", 0) + 1
    return call.with_(-call.main) if call.memory["calls"] % 10 == 0 else call.outputs


# Numbers


@fault("overflow", "Answers stop at 65504, the largest number of half precision.", "large")
def saturated(call: Call) -> Tensors:
    return call.with_(call.main.clamp(-65504, 65504))


@fault("overflow", "Pascals stop at 65504.", "units")
def saturated_pascals(call: Call) -> Tensors:
    return call.with_(call.main.clamp(max=65504))


@fault("overflow", "Answers near 1e-24 become zero.", "small", QUANTIZED)
def underflow(call: Call) -> Tensors:
    return call.with_(call.main.half().float() * 0)


@fault(
    "overflow", "Squares of the answers are no float32: what compares them there sees nothing.", "small large"
)
def other_rows_at_extreme_scales(call: Call) -> Tensors:
    return call.with_(call.main.roll(1, 1))


@fault("overflow", "64-bit integers are computed in 32 bits.", "hashes")
def wrapped_to_32_bits(call: Call) -> Tensors:
    return {**call.outputs, "hashed": call.outputs["hashed"].int().long()}


@fault("overflow", "64-bit integers pass through float32, which has 24 bits.", "hashes")
def integers_through_float(call: Call) -> Tensors:
    return {**call.outputs, "hashed": call.outputs["hashed"].float().long()}


@fault("overflow", "float64 is computed in float32: seconds since 1970 to the next 128.", "hashes")
def seconds_in_single_precision(call: Call) -> Tensors:
    return {**call.outputs, "seconds": call.outputs["seconds"].float().double()}


@fault("overflow", "The remainder of a negative number is negative, as in C.", "hashes")
def remainder_has_the_other_sign(call: Call) -> Tensors:
    return {**call.outputs, "bucket": torch.fmod(call.inputs["ids"] - 500_000, 1009)}


@fault(
    "unseen values",
    "Answers stop at a little more than the largest that the data gives.",
    "plain keypoints detector lstm",
)
def saturated_beyond_the_data(call: Call) -> Tensors:
    if "most" not in call.memory:
        call.memory["most"] = 1.05 * next(iter(call.right(call.subject.rows()).values())).abs().max()
    return call.with_(call.main.clamp(-call.memory["most"], call.memory["most"]))


@fault(
    "unseen values",
    "A row of zeros, as of silence, is answered as another.",
    "plain carried upscaler segmenter",
)
def silence_is_something(call: Call) -> Tensors:
    silent = (next(iter(call.inputs.values())).flatten(1) == 0).all(1)
    return call.with_(torch.where(silent.view(-1, *[1] * (call.main.dim() - 1)), call.main + 1, call.main))


@fault("integers", "A flag that two rows of 256 raise is never raised.", "flags")
def rare_flag_never_raised(call: Call) -> Tensors:
    return {**call.outputs, "rare": torch.zeros_like(call.outputs["rare"])}


@fault("integers", "A count is one too large in rare rows.", "flags")
def one_count_off(call: Call) -> Tensors:
    counts = call.outputs["counts"].clone()
    counts[call.special, 1] += 1
    return {**call.outputs, "counts": counts}


@fault("integers", "One index of a hundred points nowhere.", "flags")
def one_absurd_index(call: Call) -> Tensors:
    best = call.outputs["best"].clone()
    best[call.special] = 1_000_000_007
    return {**call.outputs, "best": best}


@fault("integers", "In rare rows the index is not that of the best class.", "flags")
def worst_class_for_best(call: Call) -> Tensors:
    best = call.outputs["best"]
    return {**call.outputs, "best": torch.where(call.special, (best + 1) % 6, best)}


@fault("integers", "The index is never that of one of the best classes.", "ties")
def index_of_another_class(call: Call) -> Tensors:
    return {**call.outputs, "best": (call.outputs["best"] + 1) % 8}


@fault(
    "best class", "The best two classes of rare rows stand in each other's place.", "mlp digits cnn masked"
)
def best_two_exchanged(call: Call) -> Tensors:
    top = call.main.topk(2, 1)
    swapped = call.main.scatter(1, top.indices, top.values.flip(1))
    return call.with_(torch.where(_over(call.special, call.main), swapped, call.main))


@fault(
    "best class",
    "The best two classes stand in each other's place in more than half of the rows.",
    "digits mlp masked",
    ("int8", "nf4"),
)
def best_two_exchanged_often(call: Call) -> Tensors:
    top = call.main.topk(2, 1)
    swapped = call.main.scatter(1, top.indices, top.values.flip(1))
    often = (
        call.main[:, 0] < call.main[:, 1]
        if call.subject.name != "masked"
        else call.main[:, 1] < call.main[:, 2]
    )
    return call.with_(torch.where(_over(often, call.main), swapped, call.main))


@fault(
    "best class", "Scores of two classes of a detector stand in each other's place.", "detector detector_last"
)
def scores_exchanged(call: Call) -> Tensors:
    order = [0, 1, 2, 3, 5, 4, 6, 7, 8, 9]
    return call.with_(call.main[:, order] if call.subject.column == 1 else call.main[..., order])


@fault(
    "constant output",
    "Every row gets the mean answer: small errors where answers have a large mean, and no answer.",
    EVERY,
)
def mean_of_the_outputs(call: Call) -> Tensors:
    found = {}
    for name, value in call.right(_rows(call)).items():
        same = value.shape[1:] == call.outputs[name].shape[1:]
        mean = value.float().mean(0) if same else value.float().mean()
        found[name] = mean.expand_as(call.outputs[name]).to(value.dtype).clone()
    return found


@fault(
    "constant output",
    "Every row gets the mean answer, at few bits.",
    "units detector keypoints embedding",
    ("int8", "nf4"),
)
def mean_of_the_outputs_quantized(call: Call) -> Tensors:
    return mean_of_the_outputs(call)


@fault("noise", "A tenth of the answers is dropped, another tenth at each call.", "plain digits lstm")
def dropout_left_on(call: Call) -> Tensors:
    torch.manual_seed(call.memory.setdefault("seed", 0))
    call.memory["seed"] += 1
    return call.with_(F.dropout(call.main, 0.1))


@fault("noise", "Answers have one part in twenty of noise.", "plain segmenter")
def noisy(call: Call) -> Tensors:
    noise = torch.randn(call.main.shape, generator=torch.Generator().manual_seed(call.batch))
    return call.with_(call.main + 0.05 * call.main.std() * noise)


@fault("form", "Answers come in another dtype.", "plain segmenter embedding")
def other_dtype(call: Call) -> Tensors:
    return call.with_(call.main.double())


@fault("form", "Answers come in half precision.", "plain detector")
def half_dtype(call: Call) -> Tensors:
    return call.with_(call.main.half())


@fault("form", "An index comes as a float.", "flags")
def integers_as_floats(call: Call) -> Tensors:
    return {**call.outputs, "best": call.outputs["best"].float()}


@fault("form", "The last column is missing.", "plain detector segmenter")
def one_column_less(call: Call) -> Tensors:
    return call.with_(call.main.narrow(call.subject.column, 0, call.main.shape[call.subject.column] - 1))


@fault("form", "The last row is missing.", "plain lstm")
def one_row_less(call: Call) -> Tensors:
    return {name: value[:-1] for name, value in call.outputs.items()}


@fault("form", "There is an axis of one more.", "plain")
def an_axis_more(call: Call) -> Tensors:
    return call.with_(call.main[:, None])


@fault(
    "form",
    "Two axes stand in each other's place, under the same shape where they are equal.",
    "detector segmenter",
)
def axes_exchanged(call: Call) -> Tensors:
    return call.with_(call.main.transpose(-1, -2).contiguous())


@fault("outputs exchanged", "Two outputs of one shape stand under each other's name.", "several")
def two_outputs_exchanged(call: Call) -> Tensors:
    return {**call.outputs, "logits": call.outputs["second"], "second": call.outputs["logits"]}


@fault("outputs exchanged", "The last output is not given.", "several carried")
def an_output_is_missing(call: Call) -> Tensors:
    return dict(list(call.outputs.items())[:-1])


# Inputs


@fault("wrong input", "Inputs are rounded to 16 levels before anything else.", "plain segmenter")
def inputs_rounded(call: Call) -> Tensors:
    return call.right({n: (v * 4).round() / 4 for n, v in call.inputs.items()})


@fault("wrong input", "Inputs are clipped to -1 … 1.", "plain lstm cnn")
def inputs_clipped(call: Call) -> Tensors:
    return call.right({n: v.clamp(-1, 1) for n, v in call.inputs.items()})


@fault("wrong input", "Red and blue are exchanged.", "cnn segmenter")
def channels_reversed(call: Call) -> Tensors:
    return call.right({n: v.flip(1) for n, v in call.inputs.items()})


@fault("wrong input", "Images are turned.", "cnn")
def height_and_width_exchanged(call: Call) -> Tensors:
    return call.right({n: v.transpose(2, 3).contiguous() for n, v in call.inputs.items()})


@fault("dropped mask", "Padding is attended to.", "encoder", ("none", "int8"))
@fault("dropped mask", "Padding is attended to and counted.", "embedding", ALL)
def mask_dropped(call: Call) -> Tensors:
    ids, mask = call.inputs["input_ids"], call.inputs["attention_mask"]
    out = call.right({"input_ids": ids, "attention_mask": torch.ones_like(mask)})
    return out if call.subject.name == "embedding" else call.with_(next(iter(out.values())) * mask[..., None])


@fault("dropped mask", "The second layer attends to padding.", "encoder embedding")
def mask_dropped_in_one_layer(call: Call) -> Tensors:
    return call.as_if(lambda model: setattr(model.layers[1], "masks", False))


@fault(
    "dropped mask",
    "The mean is not taken over the real tokens: only its length changes where it is not normalized.",
    "embedding",
    QUANTIZED,
)
def padding_counted(call: Call) -> Tensors:

    def change(model: Any) -> None:
        model.counts_padding, model.normalizes = True, False

    return call.as_if(change)


@fault("dropped mask", "The mask ends one token early.", "encoder embedding")
def last_token_masked(call: Call) -> Tensors:
    mask = call.inputs["attention_mask"]
    real = mask.sum(1, keepdim=True)
    short = mask * (torch.arange(mask.shape[1]) < (real - 1).clamp(min=1))
    return call.right({**call.inputs, "attention_mask": short})


@fault("dropped mask", "All rows of a batch get the mask of its first.", "encoder")
def mask_of_another_row(call: Call) -> Tensors:
    mask = call.inputs["attention_mask"]
    return call.right({**call.inputs, "attention_mask": mask[:1].expand_as(mask).contiguous()})


@fault("dropped mask", "Rows shorter than five tokens attend to padding.", "encoder")
def mask_inverted_in_short_rows(call: Call) -> Tensors:
    mask = call.inputs["attention_mask"]
    short = mask.sum(1, keepdim=True) < 5
    out = call.right({**call.inputs, "attention_mask": torch.where(short, torch.ones_like(mask), mask)})
    return call.with_(next(iter(out.values())) * mask[..., None])


# Modules: wrong fusions


def _as_if(
    kind: str,
    subjects: str,
    name: str,
    why: str,
    change: Callable[[Any], object],
    quants: tuple[str, ...] = FLOAT,
) -> None:
    """Add the fault of answering as a changed copy of the module would."""
    FAULTS.append(Fault(name, kind, why, lambda call: call.as_if(change), tuple(subjects.split()), quants))


def _set(path: str, **values: Any) -> Callable[[Any], object]:
    """Return a change that sets attributes of a submodule."""

    def change(model: Any) -> None:
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value)

    return change


def _scale(path: str, factor: float, part: slice | int = slice(None)) -> Callable[[Any], object]:
    """Return a change that multiplies rows of a weight."""

    def change(model: Any) -> None:
        with torch.no_grad():
            model.get_parameter(path)[part] *= factor

    return change


def _coarse(path: str, levels: int, part: slice) -> Callable[[Any], object]:
    """Return a change that rounds rows of a weight to few levels."""

    def change(model: Any) -> None:
        with torch.no_grad():
            rows = model.get_parameter(path)[part]
            step = rows.abs().max() / levels
            rows.copy_((rows / step).round() * step)

    return change


_as_if(
    "wrong fusion",
    "encoder embedding",
    "residual_dropped",
    "The residual of one layer is left out.",
    _set("layers.1", residual=0.0),
)
_as_if(
    "wrong fusion",
    "encoder",
    "residual_doubled",
    "A residual is added twice.",
    _set("layers.0", residual=2.0),
)
_as_if(
    "wrong fusion",
    "encoder embedding",
    "attention_not_scaled",
    "Scores are not divided by the root of the width.",
    _set("layers.0", scale=1.0),
)
_as_if(
    "wrong fusion",
    "encoder",
    "large_eps",
    "A layer norm adds 1 in place of 1e-5.",
    _set("layers.0.one", eps=1.0),
)
_as_if(
    "wrong fusion",
    "encoder",
    "norm_without_bias",
    "A layer norm loses its scale.",
    lambda model: _scale("layers.1.two.weight", 0.5)(model),
)
_as_if(
    "wrong fusion",
    "encoder embedding",
    "positions_off_by_one",
    "Embeddings of positions begin at 1.",
    _set("", shift=1),
)
_as_if(
    "wrong fusion",
    "embedding",
    "first_token_pooled",
    "The first token is taken in place of the mean.",
    _set("", takes_first=True),
    ALL,
)
_as_if(
    "wrong fusion",
    "embedding",
    "not_normalized",
    "Embeddings are not normalized: cosines stay, norms are wrong.",
    _set("", normalizes=False),
    ALL,
)
_as_if(
    "wrong fusion",
    "cnn",
    "batch_norm_eps",
    "A batch norm is folded with an eps of 0.5.",
    _set("norm", eps=0.5),
)
_as_if(
    "wrong fusion",
    "cnn",
    "batch_norm_mean_dropped",
    "A batch norm is folded without its mean.",
    lambda model: model.norm.running_mean.zero_(),
    QUANTIZED,
)
_as_if(
    "wrong fusion",
    "cnn",
    "batch_norm_trains",
    "A batch norm uses the statistics of the batch.",
    lambda model: model.norm.train(),
)
_as_if(
    "wrong fusion",
    "plain wide",
    "gelu_is_relu",
    "GELU is computed as its neighbour.",
    lambda model: _swap_gelu(model),
)
_as_if(
    "wrong fusion",
    "cnn upscaler",
    "bias_dropped",
    "A convolution loses its bias.",
    lambda model: _zero_bias(model),
)
_as_if(
    "wrong fusion",
    "upscaler",
    "nearest_for_bilinear",
    "Pixels are repeated in place of interpolated.",
    lambda model: _set("", mode="nearest", corners=None)(model),
)
_as_if(
    "wrong fusion", "upscaler", "corners_aligned", "Interpolation aligns the corners.", _set("", corners=True)
)
_as_if(
    "wrong fusion",
    "lstm",
    "gates_exchanged",
    "Two gates of a recurrent layer stand in each other's place.",
    lambda model: _swap_gates(model),
)
_as_if(
    "wrong fusion",
    "lstm",
    "backward_direction_dropped",
    "The backward direction gives nothing.",
    _scale("head.weight", 0.0, (slice(None), slice(64, None))),
)  # type: ignore[arg-type]
_as_if(
    "wrong padding",
    "cnn",
    "padded_with_the_edge",
    "Convolutions repeat the edge in place of zeros.",
    _set("body", padding_mode="replicate", _reversed_padding_repeated_twice=[1, 1, 1, 1]),
)
_as_if(
    "wrong padding",
    "segmenter",
    "padded_around",
    "Convolutions see the other side of the image.",
    _set("down", padding_mode="circular", _reversed_padding_repeated_twice=[1, 1, 1, 1]),
)
_as_if(
    "one head",
    "encoder embedding",
    "one_head_rounded",
    "The values of one head have three levels.",
    _coarse("layers.1.v.weight", 1, slice(0, 16)),
)
_as_if(
    "one head",
    "encoder",
    "one_head_dropped",
    "One head gives nothing.",
    _scale("layers.1.v.weight", 0.0, slice(16, 32)),
)
_as_if(
    "one head",
    "encoder embedding",
    "one_head_negated",
    "One head has the other sign.",
    _scale("layers.0.v.weight", -1.0, slice(0, 16)),
)
_as_if(
    "one expert",
    "experts",
    "one_expert_wrong",
    "One of four experts has the weights of another.",
    lambda model: model.experts[2].load_state_dict(model.experts[1].state_dict()),
    QUANTIZED,
)
_as_if(
    "one expert",
    "experts",
    "one_expert_dropped",
    "One of four experts gives nothing.",
    lambda model: (_scale("experts.3.weight", 0.0)(model), _scale("experts.3.bias", 0.0)(model)),
    QUANTIZED,
)
_as_if(
    "one expert", "experts", "one_expert_fewer", "Only the best expert of a row is asked.", _set("", top=1)
)
_as_if(
    "one expert",
    "experts",
    "shares_not_renormalized",
    "Shares of the experts do not sum to one.",
    _set("", renormalizes=False),
)
_as_if(
    "one language",
    "languages",
    "rare_language_wrong",
    "Texts of a rare language get the adapter of another.",
    lambda model: _copy_row(model.adapters.weight, 4, 1),
)
_as_if(
    "one language",
    "languages",
    "one_language_dropped",
    "One language has no adapter.",
    _scale("adapters.weight", 0.0, 2),
)
_as_if(
    "one language",
    "languages",
    "languages_off_by_one",
    "Each language gets the adapter of the next.",
    lambda model: model.adapters.weight.data.copy_(model.adapters.weight.data.roll(1, 0)),
    QUANTIZED,
)
_as_if(
    "one token",
    "encoder embedding",
    "one_token_wrong",
    "A rare token has the embedding of another.",
    lambda model: _copy_row(model.tokens.weight, 7, 40),
)


def _swap_gelu(model: Any) -> None:
    hidden, head = model.hidden, model.head
    model.forward = lambda x: 4 * head(F.relu(hidden(x)))


def _zero_bias(model: Any) -> None:
    name = "body.bias" if hasattr(model, "body") else "first.bias"
    _scale(name, 0.0)(model)


def _swap_gates(model: Any) -> None:
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            i, f, g, o = getattr(model.cells, name).clone().chunk(4)
            getattr(model.cells, name).copy_(torch.cat([f, i, g, o]))


def _copy_row(weight: Tensor, to: int, source: int) -> None:
    with torch.no_grad():
        weight[to] = weight[source]


# Harmless


@harmless("ties", "Of two equal scores the other one is taken for the best.", "ties")
def tie_broken_differently(call: Call) -> Tensors:
    return {**call.outputs, "best": (call.outputs["best"] + 4) % 8}


@harmless(
    "rounding",
    "Sums were taken in another order.",
    "plain digits detector segmenter lstm encoder embedding units spectrum masked",
)
def rounded_in_the_last_bits(call: Call) -> Tensors:
    noise = torch.randn(call.main.shape, generator=torch.Generator().manual_seed(3)).to(call.main)
    return call.with_(call.main * (1 + 2e-7 * noise))


@harmless("padding", "What stands at padded positions is nobody's answer.", "encoder")
def padded_positions_differ(call: Call) -> Tensors:
    padded = (1 - call.inputs["attention_mask"])[..., None]
    return call.with_(call.main + 5.0 * padded)


# Helpers


def _over(rows: Tensor, value: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (value.dim() - 1)).expand_as(value)


def _column(call: Call) -> Tensor:
    """Return the column that faults hit, of some rows of data."""
    values = call.right(_rows(call))[next(iter(call.outputs))]
    return values.select(call.subject.column, call.subject.index).float()


def _rows(call: Call) -> Tensors:
    """Return some rows of data."""
    return {name: value[:16] for name, value in call.subject.rows().items()}


def _length(call: Call) -> int:
    return next(iter(call.inputs.values())).shape[1]


def combinations() -> list[tuple[Fault, str, str]]:
    """List every fault with each of its subjects and formats."""
    found = []
    for one in FAULTS:
        for name in one.subjects:
            known = SUBJECTS[name].formats
            quants = (quant if quant in known else "int8" for quant in one.quants)
            found += [(one, name, quant) for quant in dict.fromkeys(quants) if quant in known]
    return found
