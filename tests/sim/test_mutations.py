"""The tests bite: every rule of the protocol that is taken out is noticed by some seed of the simulation or, where
hardly any seed needs it, by a test of its own. `make test` takes out one of eighty, `make test-long` one of
twenty-seven, `make mutations` each.

The tables are in `mutations`, by what they are about. Each mutation: its name; the file; the line as it is, and as
it must not be; the seed to start at, to save time, or the tests.
"""

import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from zlib import crc32

import pytest
import sim.mutations as tables
from sim.mutant import ROOT
from sim.mutations.mutation import Mutation

MUTANT = Path(__file__).with_name("mutant.py")
SEEDS = 60
TABLES = (import_module(f"sim.mutations.{table.name}") for table in pkgutil.iter_modules(tables.__path__))
MUTATIONS: list[Mutation] = [mutation for table in TABLES for mutation in getattr(table, "MUTATIONS", ())]


def run(mutation: Mutation) -> tuple[int, str]:
    """Exit code and output of the seeds, or tests, until one notices."""
    by = [mutation.by] if isinstance(mutation.by, str) else [str(mutation.by), str(SEEDS)]
    args = [mutation.file, mutation.old, mutation.new, *by]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(MUTANT.parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-P", str(MUTANT), *args], capture_output=True, text=True, timeout=900, env=env
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def sample() -> Iterator[object]:
    """The mutations that are looked at. By their names, so that they are the same ones as long as they are there;
    with ATOLL_MUTATIONS=all, all."""
    for m in MUTATIONS:
        lot = crc32(m.name.encode()) % 80
        if not m.slow and not lot:
            yield pytest.param(m, id=m.name)
        elif os.environ.get("ATOLL_MUTATIONS") == "all" or (not m.slow and lot < 3):
            yield pytest.param(m, id=m.name, marks=pytest.mark.long)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_its_line_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, "the mutation needs another fragment"


@pytest.mark.parametrize("mutation", [*sample()])
def test_it_is_noticed_that(mutation: Mutation) -> None:
    code, said = run(mutation)
    print(said)
    assert code == 0, said
