from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.harness import Run

from atoll.node.state_files import contents, folders_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    try:
        yield run
    finally:
        run.stop()
        for log in tmp_path.glob("*.log"):  # shown when the test fails
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
    for name in run.nodes:
        for folder, patterns in folders_of(tmp_path / name).items():
            assert contents(folder, patterns).others == [], "uninstalling would leave them there"
