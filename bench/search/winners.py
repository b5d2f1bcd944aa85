"""Two artifacts of searches of one source, timed in turns in a process of its own: seconds of a row by round.

python -m bench.search.winners ARTIFACT OTHER

Both are called on the inputs that trials of the search are timed on, at the smallest batch size of the plan.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from infer.artifact import store
from infer.budget_search.trial_process.messages import Setup
from infer.budget_search.trial_process.session import Session
from infer.report.search_record import Candidate
from infer.reporter import Reporter


def main(words: list[str]) -> int:
    """Write the seconds of both, a list for each, as JSON."""
    first, second = (Path(word).absolute() for word in words)
    plan = store.read_manifest(first).plan.with_(layers={}, quant="none", dtype="float32")
    candidate, smallest = Candidate(backend=plan.backend), min(plan.batches)
    with tempfile.TemporaryDirectory() as work:
        session = Session(Setup(plan=plan, name="model.infer", work=work), Reporter())
        seconds = session.rounds(candidate, (first, second), (smallest, smallest))
    print(json.dumps(seconds))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
