"""What the tests of the service share: an open journal."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from atoll.coordinator.service.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as journal:
        yield journal
