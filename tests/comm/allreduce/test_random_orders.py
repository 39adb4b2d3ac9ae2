"""The protocol of a reduce under every order of events a seed can think of, whole and with one rule broken."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from reduce_world import World

from atoll.comm.allreduce import protocol

FIRST, SEEDS = int(os.environ.get("ATOLL_FUZZ_FIRST", "0")), int(os.environ.get("ATOLL_EXCHANGE_SEEDS", "250"))


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_survivors_hold_what_the_ledger_says(block: int) -> None:
    for seed in range(FIRST + block, FIRST + SEEDS, 10):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# One rule of the protocol broken at a time: a simulation that does not notice checks nothing. Rules that hardly
# any seed breaks are in tests/sim/mutations, with the protocol's other tests.

SOURCE = Path(protocol.__file__).read_text()
MUTATIONS = {
    "frames of members still unknown are discarded": (" or place >= len(self.plan.members)", ""),
    "a member that came back is in a sum twice": ("arrived -= routes.former", "arrived -= set()"),
    "a lost contribution is not sent again": ("elif not bit(here, c) or unheard:", "elif unheard:"),
    "a lost result is not sent again": (
        "if chunk.state is ChunkState.SERVED and (chunk.since > attempt",
        "if False and (chunk.since > attempt",
    ),
    "nobody is asked for a kept chunk that is lacking": (
        "[holder]\n                out.append(SendFrame(holder, FrameKind.WANT, c, since))",
        "[holder]",
    ),
    "windows have no bound": ("while queue and len(in_flight) < self.window and", "while queue and"),
    "contributions go out in any order": (
        "deque(sorted(window.queue, key=lambda c: (self._chunks[c].since, c)))",
        "window.queue",
    ),
    "a chunk is merged as soon as anything is there": ("if due <= chunk.arrived:", "if due & chunk.arrived:"),
    "a chunk that was opened again is not forgotten": ("if not kept and chunk.digest is not None:", "if False:"),
    "a seal does not make room": (
        "            self._withdraw(c, chunk.source)\n            out += self.peer_merged(chunk.source, c)",
        "            pass",
    ),
    "newcomers get nothing that was sealed before them": ("if before and before.get(node) != place", "if False"),
    "a member that was left out goes on as before": ("self._rejoin(plan, out)", "pass"),
    "a kept chunk is not asked for": ("out.append(SendFrame(holder, FrameKind.WANT, c, since))", "pass"),
    "what is complete is told once": ("self._complete_attempt != attempt", "self._complete_attempt < 0"),
    "a relay does not wait for its region": ("if self._routes.contributes_here(c, place)}", "if False}"),
    "a relay waits for other regions": ("if self._routes.contributes_here(c, place)}", "if True}"),
    "a relay without a region sums nothing": ("if chunk.relayed and not chunk.arrived:", "if False:"),
    "sums go out before those before them": (" and self._is_made(queue[0])", ""),
    "a relay keeps what is sealed": (
        "if node != self.me and self._routes.serves(c, place):\n                    out",
        "if False:\n                    out",
    ),
    "a region's sum comes twice": ("and place not in chunk.region_sums\n", "\n"),
    "who was a relay is one": (
        "routes.plan.relays_for(c, routes.place)",
        "routes.place != owner and routes.place in [row[c] for row in routes.plan.relays]",
    ),
}


def mutant(old: str, new: str) -> Any:
    assert SOURCE.count(old) == 1, f"protocol.py has {SOURCE.count(old)} times {old!r}: choose another fragment"
    module = types.ModuleType("atoll.comm.mutant")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(SOURCE.replace(old, new), "mutant.py", "exec"), module.__dict__)
    return module


def is_noticed(protocol: Any, seeds: int) -> bool:
    for seed in range(seeds):
        try:
            World(seed, protocol).run()
        except (AttributeError, NameError):
            raise  # of this test: the mutant would notice nothing
        except Exception:
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_is_noticed(mutation: str) -> None:
    assert is_noticed(mutant(*MUTATIONS[mutation]), 100)
