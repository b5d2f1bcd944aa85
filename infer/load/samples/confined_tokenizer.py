"""Tokenizing of data by a foreign tokenizer, in a process within limits of memory and time."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...library_errors import MOST_SAID
from ...process import spawn
from ...process.spawn import describe_exit
from ...sanitize import shortened
from . import tokenizer_process

MEMORY, MEMORY_PER_BYTE = 1 << 30, 512  # bytes that tokenizing may take, and for each byte of text
SECONDS, BYTES_PER_SECOND = 30, 20_000  # of the CPU, of all threads together


def tokens_of(path: Path, texts: list[Any], limit: int | None) -> list[tuple[list[int], list[int]]]:
    """Tokenize in a process within limits: a normalizer can make 10^9 characters of one, a pattern never end.

    Raises `SourceError` where it takes more memory or time than so much text ever needs.
    """
    asked = json.dumps({"tokenizer": str(path.absolute()), "texts": texts, "limit": limit}).encode()
    memory = MEMORY + MEMORY_PER_BYTE * len(asked)
    seconds = int(SECONDS + len(asked) / BYTES_PER_SECOND)
    try:
        done = spawn.run(
            Path(tokenizer_process.__file__), [memory, seconds], given=asked, timeout=2 * seconds
        )
    except TimeoutError as error:
        raise _refused(path, texts, f"took longer than {2 * seconds} s") from error
    if done.returncode == 0:
        return [(ids, types) for ids, types in json.loads(done.stdout)]
    if done.returncode in (-signal.SIGPROF, -signal.SIGKILL):
        raise _refused(path, texts, f"took longer than {seconds} s of the CPU, or was killed")
    said = done.stderr.decode(errors="replace")
    if "memory" in said.lower():
        raise _refused(path, texts, f"took more than {memory / 1e6:.0f} MB")
    last = (said.strip().splitlines() or [f"it ended with {describe_exit(done.returncode)}"])[-1]
    raise _refused(path, texts, f"failed: {shortened(last, MOST_SAID)}")


def _refused(path: Path, texts: list[Any], why: str) -> SourceError:
    return SourceError(
        f"the tokenizer can't be used, with {len(texts)} texts it {why}",
        where=str(path),
        hint="Is it damaged? Copy tokenizer.json of the original model again",
    )
