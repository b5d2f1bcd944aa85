"""Training that sends itself Ctrl-C in its third of six steps: `python -m tests.support.interrupted_training FOLDER`.

A process of its own: a signal that no handler takes would end the process of the tests.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from infer.reporter import Reporter
from infer.tune.settings import TrainSettings
from infer.tune.training_loop import train
from tests.support.tiny_objective import TokenObjective, token_rows

SETTINGS = TrainSettings(steps=6, batch=6, learning_rate=0.01, measure_every=2)
ROWS, HELD_OUT = token_rows(), token_rows(7, seed=2)
DROPOUT, STEP = 0.5, 3


class Interrupting(Reporter):
    """Sends Ctrl-C in a step."""

    def progress(self, done: int, total: int, what: str) -> None:
        if what.startswith(f"step {STEP}:"):
            os.kill(os.getpid(), signal.SIGINT)


def main(folder: Path) -> int:
    """Train until the interrupt; print its message and whether Python's own handler is back."""
    try:
        train(TokenObjective(dropout=DROPOUT), ROWS, HELD_OUT, SETTINGS, folder, Interrupting())
    except KeyboardInterrupt as error:
        print(error)
        return 130 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(Path(sys.argv[1])))
