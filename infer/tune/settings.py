"""Options of training: those of every command that trains, of `infer tune` and of `infer distil`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from ..options import Option, values
from ..options.values import MAX_RANK, RANK

TRAINING, DATA = "Training", "Data"
OPTIMIZERS = ("adamw", "adamw8bit", "paged-adamw8bit", "muon")
SCHEDULES = ("cosine", "wsd", "linear", "constant")
PRECISIONS = ("float32", "bfloat16", "float16")
FORMS = "half, layers:N, width:SHARE, or both as layers:N,width:SHARE"  # of a student made of its teacher


RowLength = Annotated[
    int | None,
    Option(
        "tokens of a row; default: 1024, or what the model takes", group=DATA, metavar="TOKENS", minimum=8
    ),
]
HeldOutShare = Annotated[
    float,
    Option(
        "share of the data that is measured and not trained on; 0: none",
        group=DATA,
        metavar="SHARE",
        parse=partial(values.parse_share, flag="--held-out", zero=True),
        shown_default="5%",
    ),
]
ADAPTER = "Adapter"
STUDENT = "Student"
WEIGHTS = "student.pt"  # of a module of the user's, in the output


def _choice(kind: str, known: tuple[str, ...], text: str, metavar: str) -> Option:
    """Return the option of one of the `known` names, which its help lists."""
    parse = values.one_of(kind, known)
    return Option(text.format(", ".join(known)), group=TRAINING, metavar=metavar, parse=parse)


def _count(text: str, metavar: str = "N", minimum: float = 1) -> Option:
    return Option(text, group=TRAINING, metavar=metavar, minimum=minimum)


def _seconds(text: str, shown: str | None = None) -> Option:
    parse, format = values.parse_seconds, values.format_seconds
    return Option(
        text, group=TRAINING, metavar="TIME", parse=parse, format=format, minimum=0, shown_default=shown
    )


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Budget, batch, optimizer and checks of a training run; a frozen struct.

    The first budget that is reached ends the run; without any it is one epoch. A step's gradient is that of the mean
    over all terms (tokens or rows) of its `batch` rows, whatever `micro_batch` and the number of processes are.
    """

    steps: Annotated[int | None, _count("optimizer steps")] = None
    epochs: Annotated[float | None, Option("passes over the data", group=TRAINING, above=0)] = None
    time: Annotated[float | None, _seconds("time to train (30min)")] = None
    tokens: Annotated[int | None, _count("tokens (or rows, where the loss counts rows) to train on")] = None
    batch: Annotated[int, _count("rows of one step, of all processes together")] = 8
    micro_batch: Annotated[int | None, _count("rows of one forward pass; default: all of a step")] = None
    learning_rate: Annotated[float, Option("largest learning rate", group=TRAINING, above=0)] = 2e-4
    schedule: Annotated[
        str,
        _choice(
            "schedule",
            SCHEDULES,
            "learning rate after the warmup: {} (wsd: constant, then down in the last fifth)",
            "NAME",
        ),
    ] = "cosine"
    warmup: Annotated[
        float,
        Option("share of the run in which the learning rate rises", group=TRAINING, minimum=0, maximum=1),
    ] = 0.03
    optimizer: Annotated[
        str,
        _choice("optimizer", OPTIMIZERS, "{} (muon: for matrices, adamw for the rest)", "NAME"),
    ] = "adamw"
    weight_decay: Annotated[
        float, Option("decoupled weight decay of matrices", group=TRAINING, minimum=0)
    ] = 0.0
    clip: Annotated[
        float, Option("largest norm of the gradient; 0: not clipped", group=TRAINING, minimum=0)
    ] = 1.0
    precision: Annotated[
        str,
        _choice("precision", PRECISIONS, "autocast of the forward pass: {}", "DTYPE"),
    ] = "float32"
    activation_checkpointing: Annotated[
        bool, Option("recompute activations in the backward pass instead of keeping them", group=TRAINING)
    ] = False
    max_memory: Annotated[
        int | None,
        Option(
            "peak memory of the process while it trains (3GB): chooses micro-batch, checkpointing and optimizer",
            group=TRAINING,
            metavar="SIZE",
            parse=values.parse_bytes,
            format=values.format_bytes,
            minimum=1,
        ),
    ] = None
    measure_every: Annotated[int, _count("steps between two measures on held-out data")] = 50
    patience: Annotated[
        int, _count("held-out measures without a better one that end the run; 0: never", minimum=0)
    ] = 0
    checkpoint_every: Annotated[
        float, _seconds("time between two checkpoints (10min); 0: after each step", "10min")
    ] = 600.0
    seed: Annotated[int, _count("seed of the order of the data and of dropout", minimum=0)] = 0
    fresh: Annotated[
        bool, Option("forget the checkpoint of an earlier run", group=TRAINING, one_way=True)
    ] = False

    def total_steps(self, num_rows: int) -> int | None:
        """Return the steps that `steps` and `epochs` allow over so many rows; None where only time or tokens end it."""
        epochs = self.epochs
        if epochs is None and self.steps is None and self.time is None and self.tokens is None:
            epochs = 1.0
        limits = [] if self.steps is None else [self.steps]
        if epochs is not None:
            limits.append(max(1, -(-round(epochs * num_rows) // self.batch)))
        return min(limits, default=None)


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A language model, what is trained beside it, and the text to train on; a frozen struct."""

    source: Annotated[
        str, Option("a Hugging Face folder or a GGUF file of a language model", flag="", metavar="SOURCE")
    ]
    data: Annotated[
        str,
        Option(
            "chats or texts: JSON lines with messages, prompt and completion, or text; text files; a folder of these",
            group=DATA,
            metavar="PATH",
            path=True,
        ),
    ]
    base: Annotated[
        str,
        Option(
            "format of the frozen weights: none, or one of infer optimize --quant",
            group=ADAPTER,
            metavar="FORMAT",
        ),
    ] = "nf4"
    lora: Annotated[
        int, Option("rank of the adapter", group=ADAPTER, metavar="RANK", minimum=1, maximum=MAX_RANK)
    ] = RANK
    lora_alpha: Annotated[
        float | None,
        Option(
            "strength: the adapter counts ALPHA / RANK; default: twice the rank",
            group=ADAPTER,
            metavar="ALPHA",
            above=0,
        ),
    ] = None
    lora_dropout: Annotated[
        float, Option("share of the adapter's inputs that are dropped", group=ADAPTER, minimum=0, maximum=0.9)
    ] = 0.0
    lora_layers: Annotated[
        str,
        Option(
            "layers that get it, by the last part of their names (q_proj,v_proj); all: every linear layer but the head",
            group=ADAPTER,
            metavar="NAMES",
        ),
    ] = "all"
    length: RowLength = None
    packing: Annotated[
        bool, Option("several short sequences in one row, unseen by each other", group=DATA)
    ] = True
    held_out: HeldOutShare = 0.05


class DistilSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher, its student, what the student learns from it, and the data; a frozen struct."""

    source: Annotated[
        str, Option("the teacher: anything that infer optimize takes", flag="", metavar="TEACHER")
    ]
    student: Annotated[
        str,
        Option(
            f"{FORMS}: made of the teacher's weights; or a Hugging Face folder; or FILE.py:FACTORY",
            group=STUDENT,
            metavar="STUDENT",
        ),
    ]
    data: Annotated[
        str,
        Option(
            "inputs without labels: text, JSON lines or chats for a language model, else as for infer optimize",
            group=DATA,
            metavar="PATH",
            path=True,
        ),
    ]
    model: Annotated[
        str | None,
        Option(
            "FILE.py:FACTORY of a teacher that is a file of weights", group=STUDENT, metavar="FILE.py:FACTORY"
        ),
    ] = None
    trust_code: Annotated[bool, Option("open a teacher that can run code", group=STUDENT, one_way=True)] = (
        False
    )
    temperature: Annotated[
        float, Option("divisor of both models' logits in the loss", group=STUDENT, above=0)
    ] = 1.0
    hard: Annotated[
        float,
        Option(
            "share of the loss that is the next token of the text itself (language models)",
            group=STUDENT,
            minimum=0,
            maximum=1,
        ),
    ] = 0.0
    hidden: Annotated[
        float,
        Option(
            "weight of the error of hidden states, for a student made of its teacher",
            group=STUDENT,
            minimum=0,
        ),
    ] = 0.1
    length: RowLength = None
    held_out: HeldOutShare = 0.05
