"""Models by their names on the Hugging Face Hub: the name, the files that a source needs, and their download.

named(text)                 the name of a repository, None for a path of this machine
fetch(name, reporter)       its files here, in huggingface_hub's cache, at one commit
commit_of(name)             that commit, asked of the Hub, or the last one known where it can't be reached

`huggingface_hub` does the work: its cache, its token, HF_ENDPOINT, HF_HUB_OFFLINE. It is imported at the first name.
"""

from .names import HubName, missing_hint, named
from .repository import Access, Fetched, commit_of, describe, fetch, fetch_source

__all__ = [
    "Access",
    "Fetched",
    "HubName",
    "commit_of",
    "describe",
    "fetch",
    "fetch_source",
    "missing_hint",
    "named",
]
