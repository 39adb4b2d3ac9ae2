"""The texts link to files that there are, and all of them are pages of the site."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from docs_links import ROOT, links, moved, page_of, pages, sources, target


@pytest.mark.parametrize("page", pages())
def test_every_link_of_a_text_leads_to_a_file_that_there_is(page: str) -> None:
    for link in links((ROOT / page).read_text()):
        assert (ROOT / target(page, link[0])).exists(), link[0]


def test_every_text_has_one_place_in_the_sites_menu() -> None:
    def listed(part: Any) -> Iterator[str]:
        match part:
            case str():
                yield part
            case dict() | list():
                for inner in part.values() if isinstance(part, dict) else part:
                    yield from listed(inner)

    menu = list(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(menu) == sorted(page_of(page) for page in pages())


def test_links_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](config.md) [b](../SECURITY.md#doors) [c](../comm/digest.py) [d](../README.md) [e](run.svg) [f](#here)"
    )
    assert moved(text, "docs/page.md") == (
        "[a](config.md) [b](security.md#doors) [c](source/comm/digest.py.md) [d](index.md) [e](run.svg) [f](#here)"
    )
    assert moved("[a](../config.md) [b](../../comm/config)", "docs/reference/page.md") == (
        "[a](../config.md) [b](../source/comm/config.md)"
    )
    assert moved("[a](docs/config.md) [b](SECURITY.md)", "README.md") == "[a](config.md) [b](security.md)"


def test_code_and_addresses_stay_as_they_are() -> None:
    text = "`[a](b.md)` [c](https://d/e.md)\n\n    x[0](y.md)\n\n```sh\n[z](z.md)\n```\n"
    assert moved(text, "docs/page.md") == text and not list(links(text))


def test_the_sources_that_texts_link_to_are_pages() -> None:
    assert {"coordinator/state_machine/step.py", "comm/config"} <= sources()
    assert not [source for source in sources() if source.startswith("docs/")]
