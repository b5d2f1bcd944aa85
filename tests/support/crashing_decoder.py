"""Decoder process of `infer.serve.media_decoder` with faults: what a file begins with says how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from infer.serve.media_decoder.__main__ import decoded, main


def faulty(asked: Any) -> Any:
    if asked.data.startswith(b"CRASH"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if asked.data.startswith(b"HANG"):
        time.sleep(60)
    if asked.data.startswith(b"RAISE"):
        raise RuntimeError("of a library")
    if asked.data.startswith(b"GROW"):
        bytearray(1 << 30)
    while asked.data.startswith(b"SPIN"):
        pass
    return decoded(asked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], faulty))
