"""Demonstration (`make demo`): a real sentence encoder is quantized, compared with itself, and answers a question.

    python models/demo.py ["How do I read a file line by line?"]

all-MiniLM-L6-v2 is optimized to int8 exactly as `infer optimize` does it; the artifact then finds, among paragraphs of
the Python documentation, the one that answers the question.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from infer import Predictor  # noqa: E402
from infer.cli import main as infer  # noqa: E402

QUESTION = "How do I handle an exception and still run the cleanup code?"


TOPICS = (
    "try",
    "with",
    "for",
    "while",
    "if",
    "del",
    "raise",
    "import",
    "global",
    "lambda",
    "yield",
    "return",
    "break",
)


def passages() -> list[str]:
    """Return paragraphs of prose from the language reference that CPython carries."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(p.split()) for name in TOPICS for p in topics[name].split("\n\n")]
    return [
        text
        for text in dict.fromkeys(paragraphs)
        if len(text) > 80 and text[0].isupper() and text[-1] in ".:"
    ]


def answer(predictor: Predictor, question: str, texts: list[str]) -> tuple[str, float]:
    """Return the passage nearest to the question by cosine, and that cosine."""
    vectors, asked = predictor.embed(texts), predictor.embed([question])[0]
    scores = vectors @ asked
    best = int(np.argmax(scores))
    return texts[best], float(scores[best])


def main() -> int:
    import minilm

    if reason := minilm.available():
        print(reason, file=sys.stderr)
        return 5
    question = sys.argv[1] if len(sys.argv) > 1 else QUESTION
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "minilm.infer"
        data = f"{HERE / 'minilm.py'}:sentences"
        command = [
            "optimize",
            str(minilm.checkpoint_folder()),
            "--quant",
            "int8",
            "--backend",
            "ort",
            "--data",
            data,
        ]
        print(f"$ infer {' '.join(command)}\n", flush=True)
        code = infer([*command, "--output", str(artifact)])
        if code:
            return code
        start = time.perf_counter()
        with Predictor.load(artifact) as predictor:
            opened = time.perf_counter() - start
            texts = passages()
            start = time.perf_counter()
            text, score = answer(predictor, question, texts)
            seconds = time.perf_counter() - start
    print(f"\nopened, verified and self-tested in {opened:.2f} s")
    print(
        f"Q: {question}\nA: {text}\n   (cosine {score:.2f}, best of {len(texts)} passages in {seconds:.2f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
