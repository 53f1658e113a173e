"""Folders with documents and a tokenizer."""

from __future__ import annotations

import pytest

from tests.synthesize.runs import make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("synthesize"))


@pytest.fixture(scope="session")
def one_book(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("one"), books=1)


@pytest.fixture(autouse=True, scope="package")
def nothing_of_the_user():
    """Hide keys and proxies of the environment: no test may use or send them."""
    proxies = [f"{scheme}_proxy" for scheme in ("http", "https", "all")]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", *proxies, *map(str.upper, proxies)):
            patch.delenv(name, raising=False)
        yield
