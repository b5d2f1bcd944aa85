"""Files of `infer export --to gguf` opened by llama.cpp: ids of texts, and perplexity of the same text.

    python -m bench.llm.exported_gguf [--only 'pydoc_lm*'] [--packages FOLDER_WITH_LLAMA_CPP]

The trained pydoc_lm in every type, tiny random models of all architectures in F32, and SentencePiece vocabularies.
Expected: ids equal, perplexity as that of transformers on the weights that the file holds, in float32. llama.cpp
rounds activations to float16, or to 8 bits before codes. Writes results/exported-gguf-DATE-CPU.json and .md; exits 1
where a row differs.
"""

from __future__ import annotations

import fnmatch
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.llm import llama_cpp_model
from bench.shared.child_process import EngineCrashed, apart
from bench.shared.command_line import parser_of
from bench.shared.repository import MODELS
from bench.shared.results import TodaysRows
from infer.errors import NotUsableError
from infer.export import export_model
from infer.export.gguf_vocabulary import PROBES
from infer.export.gguf_writer import TYPES
from tests.support.decoder_folders import ARCHITECTURES, checkpoint, sentencepiece

NAME = "exported-gguf"
SOURCE = MODELS / "pydoc_lm"
ROWS, LENGTH = 8, 128  # windows of the text
# Relative difference of the perplexities: of weights in float32, and of types that llama.cpp rounds activations for.
EQUAL, EQUAL_ROUNDED = 1e-4, 5e-3


def cases() -> Iterator[tuple[str, str, Callable[[Path], Path]]]:
    """Yield name, type of the matrices, and the builder of the source, which is given an empty folder."""
    for kind in TYPES:
        yield f"pydoc_lm {kind}", kind, lambda folder: SOURCE
    for name, changes in ARCHITECTURES.items():
        yield name, "F32", lambda folder, name=name, changes=changes: checkpoint(folder, name, **changes)
    for prefix in (True, False):
        kind = "with" if prefix else "without"
        yield f"SentencePiece {kind} a space before", "F32", lambda folder, p=prefix: _pieces(folder, p)


def _pieces(folder: Path, prefix: bool) -> Path:
    made = checkpoint(folder, "llama", **ARCHITECTURES["llama"])
    sentencepiece(made, json.loads((made / "config.json").read_text())["vocab_size"], prefix)
    return made


def measure(source: Path, kind: str, folder: Path, count: int = ROWS) -> dict[str, Any]:
    """Export a source, open the file by llama.cpp, and return ids that differ and both perplexities."""
    from tokenizers import Tokenizer

    path = folder / "m.gguf"
    export_model(str(source), "gguf", path, kind=kind)
    export_model(str(path), "hf", folder / "decoded", kind="F32")
    text = (SOURCE / "samples.txt").read_text()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    texts = [text, *PROBES]
    wanted = [tokenizer.encode(one).ids for one in texts]
    found: list[list[int]] = apart(tokenize, path, texts)
    differ = [one for one, ours, theirs in zip(texts, wanted, found, strict=True) if ours != theirs]
    rows = torch.tensor(wanted[0][: count * LENGTH]).reshape(count, LENGTH)
    theirs = apart(llama_perplexity, path, rows.numpy(), 1)
    expected = transformers_perplexity(rows, folder / "decoded")
    return {
        **{
            "type": kind,
            "texts": len(texts),
            "texts with other ids": [one[:40] for one in differ],
            "tokens": rows.numel(),
        },
        **{"transformers": expected, "llama.cpp": theirs, "difference": theirs / expected - 1},
    }


def tokenize(path: Path, texts: list[str]) -> list[list[int]]:
    """Return llama.cpp's ids of texts; runs in a process of its own."""
    model = llama_cpp_model.Model(path)
    found = [model.tokenize(text) for text in texts]
    model.close()
    return found


def llama_perplexity(path: Path, tokens: np.ndarray, threads: int) -> float:
    """Measure perplexity by llama.cpp, tokens int64 [rows, length]; runs in a process of its own."""
    rows = torch.from_numpy(tokens)
    model = llama_cpp_model.Model(path)
    length = rows.shape[1]
    context = llama_cpp_model.Context(model, length=length, threads=threads)

    def logits(row: Tensor) -> Tensor:
        context.forget()
        context.decode(context.batch([(t, i, 0) for i, t in enumerate(row.tolist())], range(length)))
        return context.logits(range(length))

    found = _perplexity(rows, logits)
    context.close()
    model.close()
    return found


def transformers_perplexity(rows: Tensor, folder: Path) -> float:
    """Return the perplexity of rows int64 [n, length] by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return _perplexity(rows, lambda row: model(row[None]).logits[0])


def _perplexity(rows: Tensor, logits: Callable[[Tensor], Tensor]) -> float:
    """Return the perplexity of every token of a row but its first."""
    losses = [F.cross_entropy(logits(row)[:-1].float(), row[1:], reduction="sum").item() for row in rows]
    return math.exp(math.fsum(losses) / (rows.shape[0] * (rows.shape[1] - 1)))


def is_equal(row: dict[str, Any]) -> bool:
    """Return whether a row was written and read alike, or refused by a sentence."""
    if "refused" in row:
        return True
    if "why" in row or row["texts with other ids"]:
        return False
    return abs(row["difference"]) <= (EQUAL if row["type"] == "F32" else EQUAL_ROUNDED)


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown, a line for each row."""
    lines = [
        "| file | texts with equal ids | transformers | llama.cpp | difference |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["file"]
        if why := row.get("why") or row.get("refused"):
            lines.append(f"| {name} | {'refused: ' if 'refused' in row else ''}{why} | | | |")
            continue
        alike = row["texts"] - len(row["texts with other ids"])
        figures = f"{row['transformers']:.3f} | {row['llama.cpp']:.3f} | {row['difference']:+.3%}"
        lines.append(f"| {name} | {alike} of {row['texts']} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="*", help="rows, by a pattern of their names")
    parser.add_argument(
        "--packages", type=Path, help="folder with llama-cpp-python, where it is not installed"
    )
    given = parser.parse_args()
    if given.packages:
        sys.path.insert(0, str(given.packages))
    if reason := llama_cpp_model.missing():
        parser.error(reason)
    rows = TodaysRows(NAME, dict, table, key=lambda row: row["file"])
    rows.head["versions"] |= llama_cpp_model.versions()
    for name, kind, source in cases():
        if not fnmatch.fnmatch(name, given.only):
            continue
        with tempfile.TemporaryDirectory() as work:
            try:
                row = measure(source(Path(work)), kind, Path(work))
            except NotUsableError as error:
                row = {"refused": error.message}
            except EngineCrashed as error:
                row = {"why": f"llama.cpp {error}"}
            except RuntimeError as error:
                row = {"why": str(error)}
        print(name, json.dumps(row), flush=True)
        rows.keep([{"file": name, **row}])
    return 0 if all(map(is_equal, rows.read())) else 1


if __name__ == "__main__":
    sys.exit(main())
