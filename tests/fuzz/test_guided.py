"""Each decoder under atheris, from its examples and its corpus on: mutations that reach new code are mutated on.
They are the same each time; ATOLL_GUIDED_SECONDS=N takes others, for N seconds on each decoder."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.decoders import DECODERS

SECONDS = int(os.environ.get("ATOLL_GUIDED_SECONDS", "0"))
MUTATIONS = ["-seed=1", "-runs=20000", "-max_total_time=2"] if not SECONDS else [f"-max_total_time={SECONDS}"]
MARGIN = 130  # seconds to start, and for the last input
TESTS = Path(__file__).parent.parent
LOTS = [[*DECODERS][i::4] for i in range(4)]  # loading takes longer than most of the mutations


def guided(names: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run atheris, which ends without the interpreter's last steps: what it leaves is all in `folder`."""
    if importlib.util.find_spec("atheris") is None:
        pytest.fail("atheris is not installed; it is for Linux on x86-64, and comes with the extra `dev`")
    path = os.pathsep.join([str(TESTS), str(TESTS / "tools")])
    inputs, temporary = folder / "inputs", folder / "temporary"
    for made in (inputs, temporary):
        made.mkdir()
    command = [sys.executable, "-P", "-m", "fuzz.guided", ",".join(names), str(inputs), *options]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "TMPDIR": str(temporary)}
    limit = len(names) * (SECONDS + MARGIN)
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)


@pytest.mark.long
@pytest.mark.parametrize("names", LOTS, ids=["first", "second", "third", "fourth"])
def test_no_mutation_ends_a_decoder_otherwise_than_its_callers_know(names: list[str], tmp_path: Path) -> None:
    done = guided(names, tmp_path, *MUTATIONS)
    assert done.returncode == 0, done.stderr[-6000:]
    runs = [int(runs) for runs in re.findall(r"Done (\d+) runs", done.stderr)]
    assert len(runs) == len(names) and all(runs), done.stderr[-6000:]


@pytest.mark.long
def test_a_fault_ends_it_and_its_input_is_printed(tmp_path: Path) -> None:
    done = guided(["faulty", next(iter(DECODERS))], tmp_path, "-runs=100")
    assert done.returncode != 0
    assert "Done" not in done.stderr and "faulty failed" in done.stderr, done.stderr[-3000:]
    assert f"for tests/fuzz/inputs/faulty.hex: {b'fault'.hex()}\n" in done.stderr, done.stderr[-3000:]
