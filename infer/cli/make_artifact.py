"""Process that optimizes a source for a command that serves it: `python -m infer.cli.make_artifact PARENT CHANNEL`."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

from .. import hub
from ..artifact import store
from ..artifact.artifact_of_source import ArtifactMade, MakeArtifact, refuse_options
from ..paths import remove_unfinished, temporary_files
from ..process import child
from ..process.channel import Channel
from ..process.error_messages import encode_error


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 when the artifact was made, 3 when optimizing raised, which the parent is told."""
    parent, descriptor = map(int, arguments)
    child.end_with_parent(parent)
    signal.signal(signal.SIGTERM, _end)
    channel: Channel[Any] = Channel(socket.socket(fileno=descriptor), MakeArtifact)
    asked = channel.receive()
    try:
        _optimize(asked)
    except SystemExit:
        remove_unfinished()
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reports it
        channel.send(encode_error(error))
        return 3
    channel.send(ArtifactMade())
    return 0


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _optimize(asked: MakeArtifact) -> None:
    from ..run import stages
    from . import output as printed

    output = Path(asked.output)
    with temporary_files(), printed.progress_reporter(quiet=not asked.shown) as reporter:
        fetched = hub.fetch_source(asked.plan.source, reporter)
        if fetched.is_artifact:
            refuse_options(asked.plan)
            store.copy(fetched.path, output)
        else:
            stages.optimize(asked.plan, output, reporter=reporter)
    if asked.shown:
        print(f"infer: {asked.plan.source} is ready; 'infer report {output}' shows it", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
