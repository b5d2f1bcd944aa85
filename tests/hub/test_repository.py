"""Downloads from a Hub of the test's own through the real client: what is fetched, at which commit, what is said."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from infer import hub as hub_names
from infer.errors import InferError, NotUsableError, ResourceError, SourceError
from infer.hub import Fetched, fetch_source, repository
from infer.reporter import Reporter
from tests.support.local_hub import TOKEN, LocalHub

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b"{ }",
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS,
    "m.gguf": WEIGHTS,
    "README.md": b"words",
}


class Steps(Reporter):
    """Keeps the steps, and the bytes that progress came to."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.done = self.total = 0

    def step(self, name: str, detail: str = "") -> None:
        self.steps.append(f"{name} {detail}")

    def progress(self, done: int, total: int, what: str) -> None:
        self.done, self.total = max(done, self.done), total


def revision(fetched: Fetched) -> str:
    return str(next(finding.value for finding in fetched.findings if finding.what == "revision"))


def test_only_what_the_source_needs_is_downloaded(hub: LocalHub) -> None:
    made = hub.repository("org/m")
    commit, reporter = made.commit(FILES), Steps()
    fetched = fetch_source("org/m", reporter)
    assert sorted(path.name for path in fetched.path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (fetched.path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloaded == {"config.json", "tokenizer.json", "model.safetensors"}
    assert revision(fetched) == commit
    assert reporter.steps == ["download org/m, 102 kB"]
    assert reporter.done == reporter.total == len(WEIGHTS) + 5


def test_nothing_is_downloaded_twice(hub: LocalHub) -> None:
    hub.repository("org/m", FILES)
    first, reporter = fetch_source("org/m"), Steps()
    hub.sent.clear()
    assert fetch_source("org/m", reporter).path == first.path
    assert (hub.downloaded, reporter.steps) == (set(), [])


def test_a_file_changed_on_the_hub_is_fetched_again(hub: LocalHub) -> None:
    made = hub.repository("org/m", FILES)
    before = fetch_source("org/m")
    hub.sent.clear()
    commit = made.commit({**FILES, "model.safetensors": WEIGHTS[::-1]})
    after = fetch_source("org/m")
    assert revision(after) == commit != revision(before)
    assert (after.path / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert (before.path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloaded == {"model.safetensors"}


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: LocalHub) -> None:
    made = hub.repository("org/m")
    old = made.commit({**FILES, "config.json": b"old"}, tag="v1")
    new = made.commit(FILES)
    assert revision(fetch_source("org/m")) == revision(fetch_source(f"org/m@{new}")) == new
    for name in ("org/m@v1", f"org/m@{old}", f"hf:org/m@{old}"):
        fetched = fetch_source(name)
        assert (revision(fetched), (fetched.path / "config.json").read_bytes()) == (old, b"old")


def test_an_interrupted_download_goes_on_where_it_broke(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what comes in smaller pieces is lost
    hub.repository("org/m", FILES)
    hub.cuts["model.safetensors"] = 1
    fetched = fetch_source("org/m")
    assert (fetched.path / "model.safetensors").read_bytes() == WEIGHTS
    rests = [file for file in hub.sent if file.startswith("model.safetensors from ")]
    assert len(rests) == 1


def test_the_token_goes_to_the_hub_and_not_to_its_store(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repository("org/m", FILES, private=True)
    with pytest.raises(SourceError, match=r"no repository org/m that this user may read.*HF_TOKEN"):
        fetch_source("org/m")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch_source("org/m").path.is_dir()
    assert set(hub.tokens_at_store) == {""}


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("org/gated", SourceError, "org/gated is gated: its authors decide.*Ask for access on that page"),
        (
            "org/absent",
            SourceError,
            "no repository org/absent that this user may read, and there is no such file",
        ),
        ("org/m@v9", SourceError, "org/m has no revision 'v9'"),
        (f"org/m@{'0' * 40}", SourceError, "org/m has no revision '0000"),
        ("hf:org/m/none.gguf", SourceError, "no file or folder 'none.gguf'; it holds README.md"),
    ],
)
def test_what_can_not_be_had_is_one_sentence(
    hub: LocalHub, name: str, error: type[InferError], says: str
) -> None:
    hub.repository("org/m", FILES)
    hub.repository("org/gated", FILES, gated=True)
    with pytest.raises(error, match=says) as caught:
        fetch_source(name)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is error


def test_without_the_hub_the_cache_gives_what_it_has(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repository("org/m", FILES)
    online = fetch_source("org/m")
    hub.down = True
    assert fetch_source("org/m") == online
    with pytest.raises(
        NotUsableError, match=r"the Hub can't be reached, and hf:org/m/m.gguf is not in the cache"
    ):
        fetch_source("hf:org/m/m.gguf")
    with pytest.raises(NotUsableError, match=r"the Hub can't be reached, and org/other is not in the cache"):
        fetch_source("org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_source("org/m") == online
    with pytest.raises(NotUsableError, match="org/other is not in the cache, and HF_HUB_OFFLINE is set"):
        fetch_source("org/other")


def test_a_cache_that_another_program_filled_serves_offline(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import hf_hub_download

    hub.repository("org/m", FILES)
    for file in ("config.json", "model.safetensors"):
        hf_hub_download("org/m", file)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetched = fetch_source("org/m")
    assert sorted(path.name for path in fetched.path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_download_that_keeps_breaking_is_said(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    hub.repository("org/m", FILES)
    hub.cuts["config.json"] = 100
    with pytest.raises(NotUsableError, match="org/m"):
        fetch_source("org/m")
    hub.cuts.clear()
    assert fetch_source("org/m").path.is_dir()


def test_a_full_disk_is_said_before_anything_is_downloaded(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repository("org/m", FILES)
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)  # noqa: PYI024 - as shutil has it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ResourceError, match=r"org/m needs 102 kB, and the disk has 1 kB free.*HF_HOME"
    ) as caught:
        fetch_source("org/m")
    assert (caught.value.exit_code, hub.downloaded) == (7, set())


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "find_spec", lambda name: None)
    with pytest.raises(NotUsableError, match=r"needs huggingface_hub.*infer-engine\[hf\]"):
        fetch_source("org/m")


def test_a_local_path_says_that_it_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = fetch_source("org/m")
    assert found.path == Path("org/m")
    assert [(finding.what, finding.value) for finding in found.findings] == [("local path", "org/m")]
    assert "hf:org/m is the Hub's" in found.findings[0].why


def test_a_name_is_described_without_its_download(hub: LocalHub) -> None:
    commit = hub.repository("org/m").commit(FILES)
    name = hub_names.named("org/m")
    assert name is not None
    facts = hub_names.describe(name)
    assert (facts["commit"], facts["downloaded"], hub.downloaded) == (commit, False, set())
    assert facts["needs"][0] == "model.safetensors (102 kB)"
    fetch_source("org/m")
    assert hub_names.describe(name)["downloaded"] is True
