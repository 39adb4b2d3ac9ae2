"""Which file of the repository is which page of the site, and what links become there.

In the repository a page links to the files themselves, as editors and code hosts follow links. On the site
README.md is the first page, the other texts beside it are pages of their own, and so is each source file that a
page links to: no link leads away from the site, and all of them are checked when it is built.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
# A link's target, within the repository, without the part of the page.
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=(?:#[^)\s]*)?\))")
CODE = re.compile(r"^```.*?^```|^ {4}[^\n]*|`[^`]+`", re.MULTILINE | re.DOTALL)


def page_of(file: str) -> str:
    """The place on the site of a file, or a folder, of the repository."""
    if file == HOME:
        return "index.md"
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.endswith(".md") and "/" not in file:
        return file.lower()
    return f"source/{file}.md"


def links(text: str) -> Iterator[re.Match[str]]:
    """The targets of a page's links to files; what only looks like a link, in code, is left out."""
    shown = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    yield from LINK.finditer(shown)


def target(file: str, link: str) -> str:
    """The file that a link of `file` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), link))


def moved(text: str, file: str) -> str:
    """The page with its links as they are on the site."""
    here, parts, end = posixpath.dirname(page_of(file)), list[str](), 0
    for link in links(text):
        parts += [text[end : link.start()], posixpath.relpath(page_of(target(file, link[0])), here or ".")]
        end = link.end()
    return "".join([*parts, text[end:]])


def pages() -> list[str]:
    """The texts of the site, as they are called in the repository."""
    docs = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return sorted([*docs, *(path.name for path in ROOT.glob("*.md"))])


def sources() -> set[str]:
    """The files and folders beside the texts that these link to."""
    found = {target(page, link[0]) for page in pages() for link in links((ROOT / page).read_text())}
    return {file for file in found if page_of(file).startswith("source/")}
