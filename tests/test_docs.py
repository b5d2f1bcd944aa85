"""The pages that are written from the code say what the code says."""

from __future__ import annotations

import pytest

from tests.support import docs_pages


@pytest.mark.parametrize("name", docs_pages.PAGES)
def test_a_page_says_what_the_code_says(name: str) -> None:
    written = (docs_pages.ROOT / name).read_text()
    assert written == docs_pages.PAGES[name](), f"{name} is out of date: run make docs-reference"


def test_every_error_is_explained() -> None:
    assert not [kind.__name__ for kind in docs_pages.errors() if not docs_pages._what(kind)]
