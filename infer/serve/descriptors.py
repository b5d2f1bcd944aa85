"""Open files: each connection takes one, and running out of them is no way to refuse somebody."""

from __future__ import annotations

import sys

from ..errors import ResourceError
from .limits import ServeLimits

OWN = 96  # libraries, artifacts, logs, the event loop
WORKER = 8  # of one worker process: its channel, its shared memory


def make_room(limits: ServeLimits, workers: int) -> None:
    """Raise the process's own limit as far as is needed; raises `ResourceError` where that is not allowed."""
    if sys.platform == "win32":
        return
    import resource

    need = limits.max_connections + limits.spare_connections + OWN + WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ResourceError(
            f"{limits.max_connections} connections need {need} open files, and this process may have {hard}",
            hint=f"Allow more (ulimit -n {need}), or lower the limit max_connections",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
