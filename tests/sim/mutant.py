"""Run the simulation, or tests, with one line of atoll changed, in this process:

    python tests/sim/mutant.py FILE OLD NEW FIRST SEEDS
    python tests/sim/mutant.py FILE OLD NEW TESTS

Prints the first seed that notices, and what it says, or the first test; exits 1 if none of them does.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def mutate(file: str, old: str, new: str) -> str:
    """The file's text with the fragment changed, which must be there exactly once."""
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file} has {text.count(old)} times {old!r}: the mutation needs another fragment")
    return text.replace(old, new)


class Mutated(importlib.abc.SourceLoader):
    """Loads a module from its changed text."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: str) -> bytes:
        return self._text.encode()


@dataclass(frozen=True)
class Finder(importlib.abc.MetaPathFinder):
    """Finds one module."""

    module: str
    loader: Mutated

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self.loader) if name == self.module else None


def main(file: str, old: str, new: str, *by: str) -> int:
    module = "atoll." + file.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, Finder(module, Mutated(str(ROOT / file), mutate(file, old, new))))
    return a_seed(*map(int, by)) if len(by) > 1 else a_test(*by)


def a_test(tests: str) -> int:
    code = pytest.main(
        ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "long or not long", str(ROOT / tests)]
    )
    return 0 if code == pytest.ExitCode.TESTS_FAILED else 1


def a_seed(first: int, seeds: int) -> int:
    from sim.world import World

    logging.disable(logging.WARNING)

    for seed in range(first, first + seeds):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            world.close()
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            place = names[-2] if names[-1] == "hold" else names[-1]
            print(f"seed {seed}: {place}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return 0
    print(f"{seeds} seeds did not notice")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
