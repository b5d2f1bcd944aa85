"""Loop of the fuzzers that try one seed after the other: how often each ending came, and the seeds of faults."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable


def try_seeds(attempt: Callable[[int], str], default_seconds: float) -> int:
    """Call `attempt`, which returns how a seed ended, as long as the command line says: `[SECONDS [SEED]]`.

    Returns the exit code: 1 where anything was raised.
    """
    given = sys.argv[1:]
    seconds, seed = float(given[0]) if given else default_seconds, int(given[1]) if len(given) > 1 else 0
    ends: Counter[str] = Counter()
    faults, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            ends[attempt(seed)] += 1
        except Exception:  # noqa: BLE001 - that is what is looked for
            faults += 1
            print(f"seed {seed}:", file=sys.stderr)
            traceback.print_exc()
        seed += 1
    for ending, count in ends.most_common(60):
        print(f"{count:8} {ending}")
    print(f"{sum(ends.values()) + faults} tries, {faults} faults")
    return 1 if faults else 0
