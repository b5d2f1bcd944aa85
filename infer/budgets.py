"""Budgets of a search: the options that make `optimize` look for a format and a backend by itself."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .options import Option, values

SEARCH = "Search within budgets"
OBJECTIVES = values.OBJECTIVES


def _seconds(text: str) -> Option:
    """Return the option of a time, in seconds or with its unit."""
    parse, format = values.parse_seconds, values.format_seconds
    return Option(text, group=SEARCH, metavar="TIME", parse=parse, format=format, above=0)


def _bytes(text: str) -> Option:
    """Return the option of a size, in bytes or with its unit."""
    parse, format = values.parse_bytes, values.format_bytes
    return Option(text, group=SEARCH, metavar="SIZE", parse=parse, format=format, above=0)


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a result must meet, and the objective within them; a frozen struct.

    Seconds, bytes and rows per second. One call is one row: of a language model that generates, one token of one
    sequence. `Plan.max_drop` and `Plan.max_error` are budgets too while a search runs.
    """

    max_latency: Annotated[
        float | None,
        _seconds("median time of a call of one row, or of one token of one sequence (5ms)"),
    ] = None
    max_p99: Annotated[
        float | None,
        _seconds("99th percentile of the same time"),
    ] = None
    max_first_token: Annotated[
        float | None,
        _seconds("time to the first token of a language model, of a prompt of 256 tokens"),
    ] = None
    min_throughput: Annotated[
        float | None,
        Option(
            "rows per second, or tokens of all sequences, at the best of the batch sizes of --batch",
            group=SEARCH,
            above=0,
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        _bytes(
            "peak memory of a fresh process that opens and runs the artifact (300MB), with the KV cache of --sequences"
        ),
    ] = None
    max_size: Annotated[
        int | None,
        _bytes("bytes of the artifact on disk"),
    ] = None
    sequences: Annotated[
        str,
        Option(
            "sequences and tokens of each whose KV cache counts as memory (8x2048)",
            group=SEARCH,
            metavar="COUNTxTOKENS",
            parse=values.check_sequences,
        ),
    ] = ""
    metric: Annotated[
        str | None,
        Option(
            "your own measure of quality: a Python function of a Predictor, which gives a number (higher is better)",
            group=SEARCH,
            metavar="FILE.py:FUNCTION",
        ),
    ] = None
    min_score: Annotated[
        float | None,
        Option("least value of --metric; without it --max-drop limits its loss against float", group=SEARCH),
    ] = None
    objective: Annotated[
        str,
        Option(
            "objective within the budgets: latency, throughput, memory, size",
            group=SEARCH,
            flag="--for",
            metavar="OBJECTIVE",
            parse=values.parse_objective,
        ),
    ] = ""
    time: Annotated[
        float | None,
        _seconds("time for the whole search (10min); default: until every trial is done"),
    ] = None
    space: Annotated[
        dict[str, tuple[str, ...]],
        Option(
            "values to try for one of backend, quant, bits, dtype, calibrate, kv-dtype, threads, or an option of one "
            "backend (ort.prepacking); repeatable",
            group=SEARCH,
            metavar="NAME=VALUES",
            repeat=True,
            parse=values.parse_space,
            format=values.format_space,
        ),
    ] = {}
    ray: Annotated[
        bool,
        Option(
            "run trials on the other nodes of a Ray cluster too (extra ray) that are machines like this one. They need "
            "the source and the data at the same paths",
            group=SEARCH,
            one_way=True,
        ),
    ] = False
    ray_address: Annotated[
        str | None,
        Option(
            "address of the cluster, HOST:6379; default: the one that this machine belongs to", group=SEARCH
        ),
    ] = None
    keep_best: Annotated[
        bool,
        Option(
            "when interrupted, publish the best trial so far if it meets the budgets",
            group=SEARCH,
            one_way=True,
        ),
    ] = False
    fresh: Annotated[
        bool, Option("forget what earlier runs of this search measured", group=SEARCH, one_way=True)
    ] = False

    @property
    def is_given(self) -> bool:
        """True when an option that only a search has is given."""
        return any(getattr(self, name) != getattr(Budgets(), name) for name in self.__struct_fields__)

    @property
    def aim(self) -> str:
        """The objective; latency where none is given."""
        return self.objective or "latency"

    @property
    def cache_tokens(self) -> tuple[int, int]:
        """Sequences and tokens of each, whose KV cache counts as memory; (0, 0) when not asked for."""
        return values.parse_sequences(self.sequences) if self.sequences else (0, 0)
