"""Options of `infer tune`: the base, the adapter and the data."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...options import Option
from ...options.values import MAX_RANK, RANK
from ..settings import DATA, HeldOutShare, RowLength

ADAPTER = "Adapter"


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
