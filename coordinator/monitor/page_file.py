"""The page as one answer: the files of the folder `page`, put together once, with the policy that lets a browser
run and show nothing else."""

import gzip
import hashlib
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("page")
STYLES = ("vendor/uPlot.min.css", "colors.css", "style.css")
# In this order in one script, in which each is in the others' sight.
LIBRARY = "vendor/uPlot.iife.min.js"
SCRIPTS = (
    *("elements.js", "words.js", "server.js", "chart.js", "bars.js", "headline.js", "members.js", "links.js"),
    *("contributions.js", "events.js", "node_view.js", "passage.js", "round_view.js", "scrubber.js", "main.js"),
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """The page's bytes, and what goes with them."""

    body: bytes
    packed: bytes  # the same, gzip
    etag: str
    policy: str  # Content-Security-Policy


@cache
def page_file() -> PageFile:
    """The page, read at the first call."""
    style = "\n".join((FOLDER / name).read_text() for name in STYLES)
    scripts = [(FOLDER / LIBRARY).read_text(), _together((FOLDER / name).read_text() for name in SCRIPTS)]
    inside = "".join(f"<script>{script}</script>\n" for script in scripts)
    html = (FOLDER / "index.html").read_text()
    body = html.replace("<!-- style -->", f"<style>{style}</style>").replace("<!-- scripts -->", inside).encode()
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_hash(style)}; "
        f"script-src {' '.join(map(_hash, scripts))}; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return PageFile(body, gzip.compress(body, 9, mtime=0), f'"{hashlib.sha256(body).hexdigest()[:24]}"', policy)


def _together(scripts: Iterable[str]) -> str:
    return '(()=>{"use strict";\n' + "\n".join(scripts) + "\n})();"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
