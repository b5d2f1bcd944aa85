"""Generation settings of a checkpoint: end tokens and recommended sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ArtifactError, InputError
from ..engine.sampling.sampling_options import Sampling
from .chat_template import read_json, special_tokens

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class GenerationConfig(msgspec.Struct, frozen=True):
    """End tokens and `sampling`, the recommended parameters by their names in `Sampling`; empty without any."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    sampling: dict[str, float] = {}

    @classmethod
    def open(cls, folder: Path, token_id: Mapping[str, int] | None = None) -> GenerationConfig:
        """Read generation_config.json, else config.json, and the end token of tokenizer_config.json.

        `token_id` gives the id of the tokens named there.
        """
        generation, config = read_json(folder / "generation_config.json"), read_json(folder / "config.json")
        tokens = {name: (token_id or {}).get(text) for name, text in special_tokens(folder).items()}
        ends = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
        if (end := tokens.get("eos_token")) is not None and end not in ends:
            ends = (*ends, end)

        def one(name: str) -> int | None:
            found = (generation.get(f"{name}_id"), config.get(f"{name}_id"), tokens.get(name))
            return next((ids[0] for ids in map(_ids, found) if ids), None)

        sampling = _sampling(generation)
        try:
            msgspec.convert(sampling, Sampling, strict=False)
        except msgspec.ValidationError as error:
            why = f"how to sample, which the model's makers recommend, is not usable: {error}"
            raise ArtifactError(why, where=str(folder / "generation_config.json")) from error
        return cls(ends, one("bos_token"), one("pad_token"), sampling)

    def complete(self, given: Mapping[str, Any]) -> Sampling:
        """Merge `given` where not None, the checkpoint's recommendations and the defaults of `Sampling`."""
        asked = {name: value for name, value in given.items() if value is not None}
        if isinstance(stop := asked.get("stop"), str):
            asked["stop"] = (stop,)
        try:
            made = msgspec.convert({**self.sampling, **asked}, Sampling, strict=False)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise InputError(what, where=where.strip("`") or "sampling") from error
        return msgspec.structs.replace(made, top_k=0) if made.top_k == -1 else made


def _ids(found: Any) -> tuple[int, ...]:
    values = found if isinstance(found, list) else [found]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _sampling(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the recommended parameters; temperature 0 where the checkpoint says `do_sample: false`."""
    if found.get("do_sample") is False:
        return {"temperature": 0.0}
    return {
        name: found[name]
        for name in SAMPLED
        if isinstance(found.get(name), int | float) and not isinstance(found[name], bool)
    }
