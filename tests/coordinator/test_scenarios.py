"""The transcripts in scenarios/ are what the machine says. ATOLL_REWRITE=1 rewrites them: read the diff."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"atoll_tests_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(HERE.glob("scenarios/*.txt")), ids=lambda p: p.stem)
def test_the_machine_says_what_the_transcript_says(path: Path) -> None:
    said = load("scenarios").play(path.read_text())
    if os.environ.get("ATOLL_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said
