"""Tokenizers of folders without tokenizer.json (vocab.json with merges.txt, vocab.txt), converted by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..library_errors import first_sentence, quiet
from ..paths import OwnedFolder
from ..spec import Finding

NAME = "tokenizer.json"
VOCABULARIES = ("merges.txt", "vocab.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")


class ConvertedTokenizer(NamedTuple):
    """A tokenizer.json that stands for the files of a folder; `directory` holds it."""

    files: dict[str, Path]
    findings: list[Finding]
    directory: OwnedFolder | None = None


def convert_tokenizer(folder: Path) -> ConvertedTokenizer:
    """Return the folder's tokenizer as tokenizer.json, nothing where it has one or no vocabulary.

    A finding says what was converted, or why transformers could not.
    """
    held = [name for name in VOCABULARIES if (folder / name).is_file()]
    if (folder / NAME).is_file() or not held:
        return ConvertedTokenizer({}, [])
    directory = OwnedFolder("infer-tokenizer-")
    try:
        with quiet():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            tokenizer.backend_tokenizer.save(str(directory.path / NAME))
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        reason = first_sentence(error)
        why = f"the folder has no {NAME}, and transformers can't make one of {held[0]}: {reason}"
        return ConvertedTokenizer({}, [Finding("load", "tokenizer", "none", why=why)])
    why = f"made of {held[0]} by transformers' {type(tokenizer).__name__}: the folder has no {NAME}"
    done = Finding("load", "tokenizer", NAME, why=why)
    return ConvertedTokenizer({NAME: directory.path / NAME}, [done], directory)
