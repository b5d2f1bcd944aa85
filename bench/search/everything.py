"""`infer optimize` as a search that tries every candidate: no bound skips one, no short round ends one.

python -m bench.search.everything optimize SOURCE --for latency ...
"""

from __future__ import annotations

import sys

from infer import cli
from infer.budget_search import bounds
from infer.budget_search.known_trials import KnownTrials
from infer.budget_search.trial_process.messages import ToBeat
from infer.report.search_record import Candidate

BOUNDS = ("without_a_trial", "by_forms", "by_layers")


def main(words: list[str]) -> int:
    """Run the command line without bounds."""
    for name in BOUNDS:
        setattr(bounds, name, _no_bound)
    bounds.to_beat = _nothing_to_beat
    return cli.main(words)


def _no_bound(known: KnownTrials, candidate: Candidate) -> str:
    return ""


def _nothing_to_beat(known: KnownTrials, candidate: Candidate) -> ToBeat | None:
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
