"""Files of a Hugging Face folder that an artifact carries along.

A folder without tokenizer.json (vocab.json with merges.txt, vocab.txt) has its tokenizer converted by transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..library_errors import first_sentence, quiet
from ..paths import OwnedFolder
from ..spec import DECODER_IDS, Finding, TensorSpec

TOKENIZER = "tokenizer.json"
VOCABULARIES = ("merges.txt", "vocab.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
CARRIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "merges.txt",
    "vocab.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


class CarriedFiles(NamedTuple):
    """Files by their name in the artifact; `directory` holds the one that was converted."""

    files: dict[str, Path]
    findings: tuple[Finding, ...] = ()
    directory: OwnedFolder | None = None


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that an artifact carries along, by name."""
    return {name: folder / name for name in CARRIED if (folder / name).is_file()}


def carry(folder: Path, inputs: Iterable[TensorSpec]) -> CarriedFiles:
    """Return the files of the folder of a model with these inputs; one that reads text has its tokenizer among them.

    A finding says what was converted, or why transformers could not.
    """
    files = files_in(folder)
    vocabulary = next((name for name in VOCABULARIES if (folder / name).is_file()), None)
    reads_text = any(spec.name in ("input_ids", DECODER_IDS) for spec in inputs)
    if TOKENIZER in files or vocabulary is None or not reads_text:
        return CarriedFiles(files)
    directory = OwnedFolder("infer-tokenizer-")
    try:
        with quiet():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            tokenizer.backend_tokenizer.save(str(directory.path / TOKENIZER))
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        reason = first_sentence(error)
        why = f"the folder has no {TOKENIZER}, and transformers can't make one of {vocabulary}: {reason}"
        return CarriedFiles(files, (Finding("load", "tokenizer", "none", why=why),))
    why = f"made of {vocabulary} by transformers' {type(tokenizer).__name__}: the folder has no {TOKENIZER}"
    done = Finding("load", "tokenizer", TOKENIZER, why=why)
    return CarriedFiles({**files, TOKENIZER: directory.path / TOKENIZER}, (done,), directory)
