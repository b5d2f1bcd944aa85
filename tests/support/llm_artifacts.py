"""Artifacts of language models for tests, lowered to plain torch: made once a run, in a few seconds, timed by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer import Plan, optimize
from tests.support.tiny_decoders import build

PYDOC = Path(__file__).resolve().parents[2] / "models/pydoc_lm"


def pydoc(folder: Path, **changes: object) -> Path:
    """pydoc_lm with a float32 cache, so that it gives what transformers gives."""
    text = folder / "some.txt"
    text.write_text((PYDOC / "samples.txt").read_text()[:600])
    plan = Plan(
        source=str(PYDOC),
        backend="eager",
        batches=(),
        data=str(text),
        kv_dtype="float32",
        allow_slower=True,
    )
    return optimize(plan.with_(**changes), folder / "pydoc.infer").path


def tiny(
    folder: Path,
    *,
    name: str = "llama",
    sizes: dict[str, Any] | None = None,
    speaks: bool = False,
    **changes: object,
) -> Path:
    """Make a random decoder of 320 tokens, 256 positions; with `speaks` a token for each byte and a template."""
    source = folder / "tiny"
    build(name, sizes=sizes).save_pretrained(source)
    if speaks:
        bytes_as_tokens(source)
    plan = Plan(
        source=str(source),
        backend="eager",
        batches=(),
        data="random",
        kv_dtype="float32",
        allow_slower=True,
    )
    return optimize(plan.with_(**changes), folder / "tiny.infer").path


def bytes_as_tokens(folder: Path) -> None:
    """Tokens 0, 1, 2 are padding, begin and end; then the bytes; a chat is `<role>text` after `<role>text`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
