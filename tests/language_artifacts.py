"""Artifacts of language models for tests, lowered to plain torch: made once a run, in a few seconds."""

from __future__ import annotations

from pathlib import Path

from infer import Plan, optimize
from tests.tiny_decoders import build

PYDOC = Path(__file__).parent.parent / "models/pydoc_lm"


def pydoc(folder: Path, **changes: object) -> Path:
    """pydoc_lm with a float32 cache, so that it gives what transformers gives."""
    text = folder / "some.txt"
    text.write_text((PYDOC / "samples.txt").read_text()[:600])
    plan = Plan(
        source=str(PYDOC),
        backend="eager",
        batches=(1,),
        data=str(text),
        kv_dtype="float32",
        allow_slower=True,
    )
    return optimize(plan.with_(**changes), folder / "pydoc.infer").path


def tiny(folder: Path, **changes: object) -> Path:
    """A random llama of 320 tokens and 256 positions, without tokenizer and chat template."""
    source = folder / "tiny"
    build("llama").save_pretrained(source)
    plan = Plan(
        source=str(source),
        backend="eager",
        batches=(1,),
        data="random",
        kv_dtype="float32",
        allow_slower=True,
    )
    return optimize(plan.with_(**changes), folder / "tiny.infer").path
