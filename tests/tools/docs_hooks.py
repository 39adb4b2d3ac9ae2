"""What mkdocs calls while it builds the site (mkdocs.yml): pages beside docs/, and links between all of them."""

import re
from typing import Any

from docs_links import ROOT, moved, page_of, pages, sources
from mkdocs.structure.files import File, Files, InclusionLevel

LANGUAGES = {
    ".py": "python",
    ".proto": "protobuf",
    ".toml": "toml",
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
}
HEAD = "---\nsearch:\n  exclude: true\n---\n\n"
CODE_IN_TABLE = re.compile(r"`[^`]*`")
FILE_OF = {page_of(file): file for file in pages()}


def on_files(files: Files, config: Any) -> Files:
    """Add the texts beside docs/, and a page for each source file that a text links to."""
    for place, file in FILE_OF.items():
        if not file.startswith("docs/"):
            files.append(File.generated(config, place, content=(ROOT / file).read_text()))
    for source in sorted(sources()):
        place, unlisted = page_of(source), InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, place, content=_page_of_source(source), inclusion=unlisted))
    return files


def _page_of_source(source: str) -> str:
    """A page that shows a file, or what a folder has. Raises `FileNotFoundError` where a link leads nowhere."""
    path = ROOT / source
    if path.is_dir():
        names = sorted(
            f"- `{inner.name}{'/' * inner.is_dir()}`" for inner in path.iterdir() if inner.name[0] not in "._"
        )
        return f"{HEAD}# {source}\n\n" + "\n".join(names) + "\n"
    return f"{HEAD}# {source}\n\n~~~~~~ {LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~~~\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text with links as they are on the site, and with | in code as this Markdown has it: by itself."""
    if page.file.src_uri not in FILE_OF:
        return markdown
    lines = moved(markdown, FILE_OF[page.file.src_uri]).split("\n")
    return "\n".join(
        CODE_IN_TABLE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in lines
    )
