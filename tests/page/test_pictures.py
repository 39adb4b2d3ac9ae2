"""The pictures in docs/watching.md: made by this test, where ATOLL_PICTURES names the folder (`make page`)."""

import os
import struct
from pathlib import Path

import pytest
from page.browsing import NARROW, WIDE, Opener

pytestmark = pytest.mark.long
PICTURES = {
    "run-light": ("#/", WIDE, "light"),
    "run-dark": ("#/", WIDE, "dark"),
    "telephone-light": ("#/", NARROW, "light"),
    "telephone-dark": ("#/", NARROW, "dark"),
    "round": ("#/round/600", WIDE, "light"),
    "node": ("#/node/n11", WIDE, "light"),
}
MAX_BYTES = 200_000


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_page_is_made(tab: Opener, name: str, tmp_path: Path) -> None:
    where, viewport, scheme = PICTURES[name]
    reader = tab(viewport=viewport, scheme=scheme)
    reader.go(where)
    if where == "#/":
        reader.charted()
        reader.wait("document.querySelectorAll('#owners tr').length > 0")
    else:
        reader.wait("document.querySelectorAll('#view-body .bar, #view-body canvas').length > 0")
    folder = Path(os.environ.get("ATOLL_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.png"
    reader.page.screenshot(path=file)
    width, _ = struct.unpack(">II", file.read_bytes()[16:24])
    assert width == viewport["width"] and 10_000 < file.stat().st_size < MAX_BYTES
