"""Open files: every connection is one, so the limit of connections can't be above what the system allows."""

from __future__ import annotations

import os
import sys

import msgspec

from ...errors import ResourceError
from ..limits import ServeLimits

RESERVE = 64  # for models, logs and threads that open after the start
WORKER = 8  # of one worker process: its channel, its shared memory
LEAST = 8  # connections below which a server is of no use


def fit_connections(limits: ServeLimits, workers: int = 0) -> tuple[ServeLimits, str | None]:
    """The limits with as many connections as there can be files, and a sentence where those are fewer than asked.

    The soft limit of this process is raised as far as it must and may be; `workers` will be started. Raises
    `ResourceError` for hardly any.
    """
    if sys.platform == "win32":
        return limits, None
    import resource

    reserve = RESERVE + WORKER * workers
    used = _open_now() + reserve
    wanted = used + limits.max_connections + limits.spare_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits, None
    room = soft - _open_now() - min(reserve, soft // 4)
    spare = min(limits.spare_connections, max(room // 8, 1))
    cap = room - spare
    if cap < LEAST:
        raise ResourceError(
            f"only {soft} files may be open, which leaves {max(cap, 0)} for connections",
            hint=f"Raise it: ulimit -n {wanted}",
        )
    said = f"only {soft} files may be open: at most {cap} connections instead of {limits.max_connections}"
    fitted = msgspec.structs.replace(limits, max_connections=cap, spare_connections=spare)
    return fitted, f"{said} (ulimit -n {wanted} would do)"


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 32
