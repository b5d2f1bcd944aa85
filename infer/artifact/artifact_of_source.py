"""Artifact that a person names: by itself, or by its source, which is optimized into the cache at its first use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from .. import hub
from ..errors import ResourceError, UsageError
from ..options import command_line
from ..plan import Plan
from ..process.channel import ClosedError
from ..process.error_messages import ErrorMessage, decode_error
from ..process.spawn import ChildProcess, describe_exit
from .artifact_cache import cached_artifact, digest_of_files
from .manifest import MANIFEST

MAKER = (
    "infer.cli.make_artifact"  # the program of the process that optimizes: it imports torch, this one may not
)
FOLDERS = ("config.json", "modules.json")  # a folder that holds one of them is a model


class MakeArtifact(msgspec.Struct, tag="make", frozen=True):
    """Request to optimize `plan.source` into `output`, after its download; `shown`: with progress on stderr."""

    plan: Plan
    output: str
    shown: bool


class ArtifactMade(msgspec.Struct, tag="made", frozen=True, array_like=True):
    """Answer: the artifact is there."""


def artifact_of(plan: Plan, *, shown: bool = False) -> Path:
    """Return the artifact that `plan.source` is or, of a source, the one in the user's cache.

    Where it is not there yet a process of its own downloads and optimizes the source, `shown` on stderr or not. A
    source is a name of the Hub, a file, or a Hugging Face folder; a repository that is an artifact is kept as it is.
    Whoever asks for an answer gets one: a result that is no gain over the source stays. Any other path is returned.
    Raises what optimizing raises, and `UsageError` for options beside an artifact.
    """
    path, name = Path(plan.source), hub.named(plan.source)
    if name is not None:
        pinned = replace(name, revision=hub.commit_of(name))
        digest, title = str(pinned), name.stem
        plan = plan.with_(source=str(pinned))
    elif (path / MANIFEST).exists() or not _is_source(path):
        if path.exists():
            refuse_options(plan)
        return path
    else:
        digest, title = digest_of_files(path), path.absolute().name if path.is_dir() else path.stem
        plan = plan.with_(source=str(path.absolute()))
    plan = plan.with_(allow_slower=True)
    return cached_artifact(plan, digest, title, lambda place: _make(plan, place, shown))


def _is_source(path: Path) -> bool:
    return path.is_file() or path.suffix != ".infer" and any((path / name).is_file() for name in FOLDERS)


def refuse_options(plan: Plan) -> None:
    """Raise `UsageError` for options of a source beside an artifact, which was made with its own."""
    _, *given = command_line(plan.with_(trust_code=False, allow_slower=False))
    if given:
        raise UsageError(
            f"{plan.source} is an artifact, made with its own options",
            where=given[0],
            hint="Leave the option out, or give the source of the model",
        )


def _make(plan: Plan, output: Path, shown: bool) -> None:
    """Optimize in a process of its own; raise what it raised."""
    maker = ChildProcess(MAKER, ArtifactMade | ErrorMessage)
    try:
        maker.channel.send(MakeArtifact(plan, str(output), shown))
        answer = maker.channel.receive()
    except ClosedError as error:
        code = maker.wait()
        ended = "runs on" if code is None else f"ended with {describe_exit(code)}"
        raise ResourceError(
            f"the process that optimized the model {ended}",
            where=plan.source,
            hint="Memory may have run out: try infer optimize with --load offload, or a smaller model",
        ) from error
    except BaseException:  # of a signal too: it removes what it has begun
        maker.terminate()
        raise
    finally:
        maker.kill()
    if isinstance(answer, ErrorMessage):
        raise decode_error(answer)
