"""Demonstration (`make demo`): a real sentence encoder is quantized, compared with itself, and answers a question.

    python models/demo.py ["What does a generator function return?"]

all-MiniLM-L6-v2 is optimized to int8 exactly as `infer optimize` does it, for the backend that is the fastest here; the
artifact then finds, among paragraphs of the Python documentation, the one that answers the question. The artifact stays
in the current folder, to be tried out.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from infer import Predictor  # noqa: E402
from infer.cli import main as infer  # noqa: E402
from infer.distribution import DISTRIBUTION  # noqa: E402

QUESTION = "How do I handle an exception and still run the cleanup code?"
ARTIFACT = "minilm.infer"
OPENING = """all-MiniLM-L6-v2, a sentence encoder of 22 M parameters, becomes int8: it is compiled for this machine,
compared with its float original on real sentences, and timed against it.
"""
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


def typed(path: Path) -> str:
    """Return a path as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def script(name: str) -> str:
    """Return the path of a program of this environment."""
    return typed(Path(sys.executable).with_name(name))


def closing(question: str, text: str, facts: str) -> str:
    """Return the demo's last screen: question, answer, time and memory, and commands to try next."""
    wrapped = textwrap.fill(text, 88, initial_indent="Answer:   ", subsequent_indent=" " * 10, max_lines=6)
    infer, python = script("infer"), script(Path(sys.executable).name)
    return f"""
Question: {question}
{wrapped}
{textwrap.indent(facts, " " * 10)}

Try next:
  {infer} serve {ARTIFACT}
      serve it over HTTP; http://127.0.0.1:8000 then shows requests, latency and example calls
  {python} models/demo.py "What does a generator function return?"
      ask another question
  {infer} optimize YOUR_MODEL --quant int8
      do the same with a model of yours: .pt, .safetensors, a Hugging Face folder;
      .onnx after {script("pip")} install '{DISTRIBUTION}[ort]'
"""


def main() -> int:
    """Optimize the encoder, answer the question with it, and return the exit code."""
    import minilm

    if reason := minilm.available():
        print(reason, file=sys.stderr)
        return 5
    question = sys.argv[1] if len(sys.argv) > 1 else QUESTION
    options = ["--quant", "int8", "--data", f"{typed(HERE / 'minilm.py')}:sentences"]
    command = ["optimize", typed(minilm.checkpoint_folder()), *options, "--output", ARTIFACT, "--force"]
    print(f"{OPENING}\n$ infer {shlex.join(command)}\n", flush=True)
    if code := infer(command):
        return code
    start = time.perf_counter()
    with Predictor.load(ARTIFACT) as predictor:
        opened = time.perf_counter() - start
        texts = passages()
        start = time.perf_counter()
        text, score = answer(predictor, question, texts)
        seconds = time.perf_counter() - start
    facts = f"(the best of {len(texts)} passages by cosine, {score:.2f}; found in {seconds:.2f} s,\n"
    facts += f"after opening, verifying and self-testing the artifact in {opened:.2f} s)"
    print(closing(question, text, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
