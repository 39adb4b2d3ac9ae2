"""The console blocks of README.md and the guides do what they show.

A block ```console is run: each line with `$ ` in front is a command, which must succeed; what stands below it must
be in its output, line by line, where ... is any text, a line of it alone any lines. The blocks of a page are one
session of bash, in an empty home folder; the guides for a volunteer and for who watches share one, in which a
coordinator is there already. Blocks of other kinds are for reading.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from docs_links import ROOT, pages

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "-- end of"  # of a command's output
SECONDS = 150.0  # that a page's session may take
# The run that guides take for granted. curl finds its page at the usual port.
STARTED = (
    "atoll coordinator start demo members.start=1 members.minimum=1 rounds.inner_steps=12 rounds.total=1000 "
    "figures.jsonl=true > coordinator.log 2>&1 &",
    "until atoll status > status.txt 2>&1; do sleep 1; done",
    "sed -n 's|.*page at http://|connect-to = 127.0.0.1:4701:|p' coordinator.log > .curlrc",
    "atoll invite > join-url",
)
STOPPED = "kill $! && wait $!"
IN_ONE_RUN = (
    *STARTED,
    *("docs/volunteer.md", "docs/monitoring.md", "docs/blame.md"),
    STOPPED,
    *("docs/watching.md", "docs/wandb.md"),
)


class Shown(NamedTuple):
    """A command of a page, and the lines below it."""

    command: str
    output: list[str]


def session(page: str) -> list[Shown]:
    """The commands of a page's console blocks."""
    found = list[Shown]()
    for block in BLOCK.findall((ROOT / page).read_text()):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Shown(line.removeprefix("$ "), []))
            else:
                found[-1].output.append(line)
    return found


def sessions() -> list[tuple[str, ...]]:
    """The sessions of all pages, as pages and commands between them."""
    alone = (page for page in pages() if session(page) and page not in IN_ONE_RUN)
    return [*((page,) for page in alone), IN_ONE_RUN]


def page_of(parts: tuple[str, ...]) -> str:
    """The page by which a session goes."""
    return next(part for part in parts if part.endswith(".md"))


def commands(parts: Iterable[str]) -> Iterator[Shown]:
    """The commands of a session."""
    for part in parts:
        yield from session(part) if part.endswith(".md") else [Shown(part, [])]


def pattern(lines: list[str]) -> str:
    """A regular expression of an output with these lines in it."""
    each = (r"(?:.*\n)*?" if line.strip() == "..." else one_line(line) + r"\n" for line in lines)
    return r"(?:.*\n)*?" + "".join(each) + r"(?:.*\n)*"


def one_line(line: str) -> str:
    return ".*".join(map(re.escape, line.rstrip().split("..."))) + " *"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home folder; what was started with it is killed in the end."""
    yield tmp_path
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("HOME") == str(tmp_path):
            process.kill()
            process.wait(10)


def surroundings(home: Path) -> dict[str, str]:
    """The environment of a session: commands as they are typed, on ports that nobody else has."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "ATOLL_"))}
    coordinator = str(home / ".local/state/atoll/coordinator")
    return kept | {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        "ATOLL_COORDINATOR_START_LISTEN": "127.0.0.1:0",
        "ATOLL_COORDINATOR_START_HTTP": "127.0.0.1:0",
        "ATOLL_STATUS_STATE_DIR": coordinator,  # where the page is, if not at its usual port
        "ATOLL_CONTRIBUTIONS_STATE_DIR": coordinator,
        "ATOLL_BLAME_STATE_DIR": coordinator,
    }


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(parts, id=page_of(parts), marks=[] if page_of(parts) == "README.md" else pytest.mark.chaos)
        for parts in sessions()
    ],
)
def test_the_console_blocks_of_a_page_do_what_they_show(parts: tuple[str, ...], home: Path) -> None:
    shown = list(commands(parts))
    script = home / "session.sh"
    script.write_text("".join(f'{each.command}\necho "{END} {n}: $?"\n' for n, each in enumerate(shown)))
    said = home / "said"
    with said.open("w") as out:
        bash = subprocess.Popen(
            ["bash", "--norc", str(script)], cwd=home, env=surroundings(home), stdout=out, stderr=out
        )
        with contextlib.suppress(subprocess.TimeoutExpired):  # what it had not done by then is named below
            bash.wait(SECONDS)
    outputs = re.split(rf"{END} \d+: (\d+)\n", said.read_text())
    for each, output, code in zip(shown, outputs[::2], outputs[1::2], strict=False):
        assert code == "0", f"{each.command}\n{output}"
        assert re.fullmatch(pattern(each.output), output), f"{each.command}\n{output}"
    assert len(outputs) == 2 * len(shown) + 1, (
        f"not done in {SECONDS:g} s: {shown[len(outputs) // 2].command}\n{outputs[-1][-2000:]}"
    )


def test_an_output_has_the_lines_that_are_shown() -> None:
    output = "one\ntwo 2\nthree\nfour  \n"
    for lines in ([], ["one"], ["two ..."], ["one", "...", "four"], ["two ...", "three"], ["..."]):
        assert re.fullmatch(pattern(lines), output), lines
    for lines in (["five"], ["one", "three"], ["two"], ["three", "one"], ["on"]):
        assert not re.fullmatch(pattern(lines), output), lines


def test_the_entry_and_the_guides_have_commands_that_are_run() -> None:
    assert len(session("README.md")) > 8
    for guide in ("operator", "researcher", "volunteer", "watching", "blame", "monitoring", "wandb"):
        assert session(f"docs/{guide}.md"), guide
