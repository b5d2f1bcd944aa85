"""Limit of open files: caps the number of connections."""

from __future__ import annotations

import os
import sys

import msgspec

from ...errors import ResourceError
from ..limits import ServeLimits

RESERVE = 64  # files for models, logs and threads opened later
WORKER = 8  # files of one worker process: channel, shared memory
LEAST = 8  # connections


def fit_connections(limits: ServeLimits, workers: int = 0) -> tuple[ServeLimits, str | None]:
    """Return limits with as many connections as files may be open, and a warning if these are fewer than configured.

    Raises the soft limit of this process as far as needed and allowed. `workers`: number of worker processes that will
    be started. Raises `ResourceError` for fewer than `LEAST` connections.
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
    warning = f"only {soft} files may be open: at most {cap} connections instead of {limits.max_connections}"
    fitted = msgspec.structs.replace(limits, max_connections=cap, spare_connections=spare)
    return fitted, f"{warning} (ulimit -n {wanted} would do)"


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 32
