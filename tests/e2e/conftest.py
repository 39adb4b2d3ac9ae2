from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.harness import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    try:
        yield run
    finally:
        run.stop()
        for log in tmp_path.glob("*.log"):  # shown when the test fails
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
