"""A run whose data are a data set on a web server: nodes come with empty disks and need nothing but the URL."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from data_sets import WebServer, web_server, write_data_set
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "web").mkdir()
    with web_server(tmp_path / "web") as served:
        yield served


def trouble(run: Run, name: str) -> str:
    said: str = run.member(name).get("trouble", "")
    return said


def kept(run: Run, name: str) -> int:
    found = 0
    for path in (run.folder / name / "cache" / "blocks").glob("??/*"):
        with suppress(FileNotFoundError):  # what is being written gets its name in a moment
            found += path.stat().st_size
    return found


def test_nodes_with_empty_disks_train_by_the_url_alone_and_keep_a_twentieth_of_the_corpus(
    web: WebServer, run: Run
) -> None:
    digest = write_data_set(web.folder, train=1_000_000, validation=20_000, block_tokens=128, shard_blocks=512)
    corpus = sum(path.stat().st_size for path in web.folder.iterdir())
    bound = corpus / 20
    run.start("data.kind=dataset", f"data.url={web.url}", f"data.digest={digest}")
    url = run.invite(3)
    names = ("one", "two")
    for name in names:
        run.join(url, name, f"cache={bound / 1e9:.9f}")
    run.commit_after(2)
    web.status = 503  # costs steps as soon as what is ahead is trained on
    # Who has its steps of the round waits for the other one.
    until("the trouble of a node", lambda: any("and tries again" in trouble(run, name) for name in names))
    web.status = 0
    until("the end of the trouble", lambda: not any(trouble(run, name) for name in names))
    run.join(url, "three", f"cache={bound / 1e9:.9f}")
    until("all three", lambda: run.contributors() == 3)
    run.commit_after(run.committed())
    for name in (*names, "three"):
        assert 0 < kept(run, name) <= bound
        assert "nothing of that block is learned" not in run.log(name)
    run.whole(run.committed() - 2)  # whose records are there
