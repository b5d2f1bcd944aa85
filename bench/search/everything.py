"""`infer optimize` as a search that tries every candidate: no bound skips one, no short round ends one.

python -m bench.search.everything optimize SOURCE --for latency ...
"""

from __future__ import annotations

import sys

from infer import cli
from infer.budget_search import best_to_beat, skip_bounds
from infer.budget_search.known_trials import KnownTrials
from infer.budget_search.trial_process.messages import ToBeat
from infer.report.search_record import Candidate

BOUNDS = ("_too_large", "_above_roofline", "_unfaithful", "_too_slow", "_slower_layers", "_no_better_layers")


def main(words: list[str]) -> int:
    """Run the command line without bounds."""
    for name in BOUNDS:
        setattr(skip_bounds, name, _no_bound)
    best_to_beat.to_beat = _nothing_to_beat
    return cli.main(words)


def _no_bound(known: KnownTrials, candidate: Candidate) -> str:
    return ""


def _nothing_to_beat(known: KnownTrials, candidate: Candidate) -> ToBeat | None:
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
