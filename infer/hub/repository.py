"""Repositories of the Hub through huggingface_hub: their commit, their files, and a sentence where there are none."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import paths
from ..distribution import install
from ..errors import InferError, NotUsableError, ResourceError, SourceError
from ..library_errors import as_resource_error
from ..library_errors import describe as described
from ..regular_files import is_there
from ..reporter import Reporter
from ..spec import Finding
from .choose_files import Choice, choose
from .names import MAIN, PREFIX, HubName, bare_name, named

SPARE_BYTES = 256 << 20  # of the disk, that a download leaves


@dataclass(frozen=True)
class Fetched:
    """A source on this machine: `path` is what is opened, `findings` say where it came from.

    `is_artifact`: it was optimized by infer already; its files are links into the cache.
    """

    path: Path
    findings: tuple[Finding, ...] = ()
    is_artifact: bool = False


@dataclass(frozen=True)
class Access:
    """Options of huggingface_hub by its own names; without them its own settings decide."""

    token: bool | str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False


def fetch_source(text: str, reporter: Reporter | None = None) -> Fetched:
    """Return the path of a source: of a name of the Hub after its download, of anything else the text itself."""
    name = named(text)
    if name is not None:
        return fetch(name, reporter)
    shadowed = bare_name(text)
    if shadowed is None:
        return Fetched(Path(text))
    why = f"it comes before the repository of this name; {PREFIX}{shadowed.repo} is the Hub's"
    return Fetched(Path(text), (Finding("load", "local path", text, why=why),))


def fetch(name: HubName, reporter: Reporter | None = None, access: Access = Access()) -> Fetched:
    """Download what a source needs and is not in huggingface_hub's cache.

    Raises `NotUsableError` where the Hub can't be reached and the cache lacks it, `SourceError` for a repository, a
    revision or a file that is not there or that this user may not read, `ResourceError` for a disk without room.
    """
    hub, reporter = _library(), reporter or Reporter()
    with _errors(name):
        revision = _revision(name, access)
        sizes = _sizes(name, revision, access)
        chosen = choose(name, sizes)
        absent = sum(sizes[file] for file in chosen.files if not _is_cached(name, file, revision, access))
        if absent:
            _require_room(name, absent, access)
            reporter.step("download", f"{name}, {_size(absent)}")
        snapshot = hub.snapshot_download(
            name.repo,
            revision=revision,
            allow_patterns=[glob.escape(file) for file in chosen.files],
            tqdm_class=_progress(reporter, absent),
            **asdict(access),
        )
    total = sum(sizes[file] for file in chosen.files)
    why = f"{name.repo} of the Hub at {name.revision or MAIN}: {len(chosen.files)} files, {_size(total)}"
    findings = [Finding("load", "revision", revision.resolved, why=why)]
    if chosen.why:
        findings.append(Finding("load", "file of the repository", chosen.opens, why=chosen.why))
    folder = Path(snapshot)
    if chosen.opens.endswith(".onnx") and len(chosen.files) > 1:
        folder = _plain_copy(name, revision.resolved, folder, chosen)
    return Fetched(folder / chosen.opens, tuple(findings), chosen.is_artifact)


def commit_of(name: HubName) -> str:
    """Return the commit of a name's revision, as the Hub says or, where it can't be reached, as it was last known."""
    with _errors(name):
        commit: str = _revision(name, Access()).resolved
    return commit


def describe(name: HubName) -> dict[str, Any]:
    """Return what a source of this name is, without downloading it."""
    access = Access()
    with _errors(name):
        revision = _revision(name, access)
        sizes = _sizes(name, revision, access)
    chosen = choose(name, sizes)
    return {
        "kind": "artifact on the Hub" if chosen.is_artifact else "repository of the Hub",
        "name": str(name),
        "commit": revision.resolved,
        "needs": [f"{file} ({_size(sizes[file])})" for file in chosen.files],
        "bytes": sum(sizes[file] for file in chosen.files),
        "downloaded": all(_is_cached(name, file, revision, access) for file in chosen.files),
        **({"chosen": chosen.why} if chosen.why else {}),
    }


def _library() -> Any:
    """Import huggingface_hub; raise `NotUsableError` where it is absent or too old."""
    hint = f"{install('hf')}, or download the model and give its path"
    if find_spec("huggingface_hub") is None:
        raise NotUsableError("a model by its name on the Hub needs huggingface_hub", hint=hint)
    import huggingface_hub

    if not hasattr(huggingface_hub.HfApi, "resolve_revision"):
        found = huggingface_hub.__version__
        raise NotUsableError(
            f"a model by its name needs huggingface_hub 1.31 or newer, got {found}", hint=hint
        )
    return huggingface_hub


def _revision(name: HubName, access: Access) -> Any:
    """Return the name's revision with its commit: huggingface_hub's `ResolvedRevision`."""
    return (
        _library()
        .HfApi(token=access.token)
        .resolve_revision(
            name.repo,
            revision=name.revision,
            cache_dir=access.cache_dir,
            local_files_only=access.local_files_only,
        )
    )


def _sizes(name: HubName, revision: Any, access: Access) -> dict[str, int]:
    """Return path → bytes of every file at a revision; of a Hub that can't be reached, of those in the cache."""
    from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(name.repo, revision=revision, cache_dir=access.cache_dir)
        return {file.path: file.size for file in tree}
    except CachedRepoTreeNotFoundError:
        pass
    if access.local_files_only:
        return _snapshot_files(name, revision, access)
    try:
        listed = HfApi(token=access.token).list_repo_tree(
            name.repo, revision=revision.resolved, recursive=True
        )
        return {file.path: file.size for file in listed if isinstance(file, RepoFile)}
    except Exception as error:
        if not _is_unreachable(error) or not (held := _snapshot_files(name, revision, access)):
            raise
        return held


def _snapshot_files(name: HubName, revision: Any, access: Access) -> dict[str, int]:
    """Return the files of a revision that the cache holds, for one that another program downloaded."""
    hub = _library()
    try:
        found = hub.snapshot_download(
            name.repo, revision=revision, cache_dir=access.cache_dir, local_files_only=True
        )
    except hub.errors.LocalEntryNotFoundError:
        return {}
    folder = Path(found)
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }


def _is_cached(name: HubName, file: str, revision: Any, access: Access) -> bool:
    found = _library().try_to_load_from_cache(
        name.repo, file, revision=revision.resolved, cache_dir=access.cache_dir
    )
    return isinstance(found, str) and not access.force_download


def _require_room(name: HubName, needed: int, access: Access) -> None:
    from huggingface_hub import constants

    place = Path(access.cache_dir or constants.HF_HUB_CACHE)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed + SPARE_BYTES > free:
        raise ResourceError(
            f"{name} needs {_size(needed)}, and the disk has {_size(free)} free",
            where=str(place),
            hint="Free some, or set HF_HOME to a folder on a disk with more. Nothing was downloaded",
        )


def _plain_copy(name: HubName, commit: str, snapshot: Path, chosen: Choice) -> Path:
    """Copy an ONNX file and its data out of the cache, whose files are links: data of ONNX are plain files."""
    place = (
        paths.cache("hub") / f"{name.repo.replace('/', '--')}-{commit[:16]}" / chosen.opens.replace("/", "--")
    )
    if place.exists():
        return place
    with paths.unfinished(place.with_name(f".{place.name}.tmp-{os.getpid()}")) as staged:
        for file in chosen.files:
            (staged / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot / file, staged / file)
        try:
            staged.rename(place)
        except OSError:
            if not place.exists():  # made by another process in the meantime
                raise
    return place


def _progress(reporter: Reporter, total: int) -> Any:
    """Return the class of progress bars for huggingface_hub: it shows nothing itself and tells the reporter bytes."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes, self._done = options.get("unit") == "B", 0
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            if self._counts_bytes:
                reporter.progress(self._done, total, f"{_size(self._done)} of {_size(total)}")

    return Bar


@contextmanager
def _errors(name: HubName) -> Iterator[None]:
    """Convert the errors of huggingface_hub to one sentence each."""
    hub = _library()
    errors = hub.errors
    place = hub.constants.ENDPOINT
    try:
        yield
    except InferError:
        raise
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{name.repo} is gated: its authors decide who may download it",
            where=f"{place}/{name.repo}",
            hint="Ask for access on that page, then log in: hf auth login, or set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        local = "" if is_there(Path(str(name))) else ", and there is no such file or folder here"
        raise SourceError(
            f"the Hub has no repository {name.repo} that this user may read{local}",
            where=place,
            hint="Check the name; for a private repository log in: hf auth login, or set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(
            f"{name.repo} has no revision {name.revision or MAIN!r}",
            where=f"{place}/{name.repo}",
            hint="Give a branch, a tag or a whole commit hash; without @REVISION it is the main branch",
        ) from error
    except Exception as error:
        if refusal := as_resource_error(error):
            raise refusal from error
        raise _unusable(name, error, place, offline=hub.is_offline_mode()) from error


def _unusable(name: HubName, error: Exception, place: str, *, offline: bool) -> InferError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return SourceError(
            f"the Hub refuses to give {name.repo} to this user (HTTP {status})",
            where=place,
            hint="Log in: hf auth login, or set HF_TOKEN to a token that may read it",
        )
    if offline and _is_unreachable(error):
        return NotUsableError(
            f"{name} is not in the cache, and HF_HUB_OFFLINE is set",
            where=os.environ.get("HF_HUB_CACHE", "the cache of huggingface_hub"),
            hint="Unset it to download the model, or give the path of a local one",
        )
    if _is_unreachable(error):
        return NotUsableError(
            f"the Hub can't be reached, and {name} is not in the cache whole: {described(error)}",
            where=place,
            hint="Check the network and HF_ENDPOINT, or give the path of a local model",
        )
    return NotUsableError(
        f"the download of {name} failed: {described(error)}",
        where=place,
        hint="Run the command again: files that are whole stay",
    )


def _is_unreachable(error: Exception) -> bool:
    """Return true for an error of the connection, an answer that the Hub is down, and for what the cache lacks then."""
    from huggingface_hub import errors

    kinds = (errors.OfflineModeIsEnabled, errors.RevisionResolutionError, errors.LocalEntryNotFoundError)
    status = getattr(getattr(error, "response", None), "status_code", 0)
    transport = any(
        kind.__name__ == "TransportError" for kind in type(error).__mro__
    )  # of httpx or its successor
    return isinstance(error, kinds) or transport or status >= 500


def _size(count: int) -> str:
    """Format bytes: 270 MB."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.3g} {unit}"
    return f"{count} bytes"
