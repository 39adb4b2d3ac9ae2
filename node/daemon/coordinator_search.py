"""The search for a coordinator that does not answer any more at the address by which this node joined.

    Answers ──silent for SILENT_SECONDS──> Searching ──SEARCH_SECONDS──> Waits ──its pause──> Searching ...
       └────the same, and nothing to search by────> Waits for ever
    each ──it answers, at its old address or at a new one──> Answers

`step` decides. `CoordinatorSearch` acts: it has a gateway look the run's signed record up, as that of a node whose
URL names gateways does (`atoll.node.gateway.finding`), and the control client goes on where something shows the
certificate of the join URL's pin: at the address in the record, or, where that cannot be dialled, through the
gateways. A node whose URL names gateways needs none of this: its connections lead to the newest record always.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf
from typing import assert_never

from atoll.comm.errors import AtollError
from atoll.node.control.client import ControlClient
from atoll.node.daemon.node_gateway import NodeGateway
from atoll.node.daemon.state_dir import ends_before
from atoll.node.gateway.client import GatewayProcess

log = logging.getLogger("atoll.node")
SILENT_SECONDS = 20.0  # of the coordinator, after which it is looked for: one that is started again takes fewer
SEARCH_SECONDS = 60.0  # of one search: a gateway takes memory, and its start some of them
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 600.0  # between two; twice as long after each
DECISION_INTERVAL = 1.0  # seconds
LOOK_INTERVAL = 2.0  # seconds between two tries whether it is reached


@dataclass(frozen=True, slots=True)
class Answers:
    """The coordinator does, or has not been silent for long."""


@dataclass(frozen=True, slots=True)
class Searching:
    """It is looked for elsewhere."""

    until: float  # seconds
    pause: float  # seconds, before the next search


@dataclass(frozen=True, slots=True)
class Waits:
    """It is not looked for, for now."""

    until: float  # seconds; infinite: as long as it is silent
    pause: float = FIRST_PAUSE_SECONDS  # seconds, after the next search


State = Answers | Searching | Waits


class Act(Enum):
    """What is to be done."""

    NOTHING = auto()
    SEARCH = auto()  # begin to
    STOP = auto()  # the search that is under way
    ADVISE = auto()  # say what would help


def step(state: State, silent: float, can_search: bool, now: float) -> tuple[State, Act]:
    """The next state, and what is to be done, at `now` (seconds). `silent`: seconds for which the coordinator has
    not answered, 0: it does."""
    if silent < SILENT_SECONDS:
        return Answers(), Act.STOP if isinstance(state, Searching) else Act.NOTHING
    match state:
        case Answers() if not can_search:
            return Waits(inf), Act.ADVISE
        case Answers():
            return Searching(now + SEARCH_SECONDS, FIRST_PAUSE_SECONDS), Act.SEARCH
        case Searching(until, pause) if now >= until:
            return Waits(now + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)), Act.STOP
        case Waits(until, pause) if now >= until:
            return Searching(now + SEARCH_SECONDS, pause), Act.SEARCH
        case Searching() | Waits():
            return state, Act.NOTHING
        case _:
            assert_never(state)


class CoordinatorSearch:
    """Where the coordinator of one run is, for the control client of a node that joined by an address."""

    def __init__(self, control: ControlClient, gateway: NodeGateway) -> None:
        self._invite, self._control, self._gateway = gateway.invite, control, gateway
        self._state: State = Answers()
        self._enough = asyncio.Event()  # of the search that is under way
        control.is_sought = lambda: not gateway.lacks_for_search

    @property
    def words(self) -> str:
        """What is done about a coordinator that does not answer, or what would help; empty: nothing yet."""
        if isinstance(self._state, Answers):
            return ""
        if lacks := self._gateway.lacks_for_search:
            return f"should it have moved, this node does not find it at its new address: {lacks}"
        return "should it have moved, the run's gateways know where: it is looked up there"

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Look for the coordinator whenever it is silent while the context lasts, from where it was found last."""
        await self._begin()
        searching = asyncio.create_task(self._run())
        try:
            yield
        finally:
            searching.cancel()
            await asyncio.gather(searching, return_exceptions=True)

    async def _begin(self) -> None:
        """Go on where the coordinator was found in this node's last life, or where the URL says, if it is back."""
        if not (address := self._gateway.whereabouts.moved_to):
            return
        for place in (address, self._invite.address):
            if await self._goes_on(place):
                log.info(f"the coordinator, once at {self._invite.address}, is at {place}")
                return
        self._control.invite = replace(self._invite, address=address)  # the last that is known

    async def _run(self) -> None:
        if self._invite.rendezvous:
            return
        async with asyncio.TaskGroup() as searches:
            while True:
                silent = self._control.away
                can_search = silent >= SILENT_SECONDS and not self._gateway.lacks_for_search
                self._state, act = step(self._state, silent, can_search, time.monotonic())
                match act:
                    case Act.SEARCH:
                        self._enough = asyncio.Event()
                        searches.create_task(self._search(self._enough))
                    case Act.STOP:
                        self._enough.set()
                    case Act.ADVISE if not self._control.admitted:
                        pass  # this node never joined: the URL may be wrong, and nothing has moved
                    case Act.ADVISE:
                        log.warning(f"the coordinator is still silent; this node keeps on trying; {self.words}")
                    case Act.NOTHING:
                        pass
                    case _:
                        assert_never(act)
                await asyncio.sleep(DECISION_INTERVAL)

    async def _search(self, enough: asyncio.Event) -> None:
        log.info(f"the coordinator is still silent; {self.words}")
        try:
            async with self._gateway.for_search() as process:
                await ends_before(enough, self._find(process), 0.0)
        except AtollError as error:
            log.info(f"the coordinator was not found elsewhere: {error}")
        except Exception:
            log.exception("the coordinator was not found elsewhere: a fault of this node")

    async def _find(self, process: GatewayProcess) -> None:
        """Have the control client go on where the coordinator is. Raises `Unreachable`: no record is found."""
        while True:
            entrance = await process.lead_to_coordinator(self._invite, SEARCH_SECONDS)
            found, before = process.found, self._control.invite.address
            if found and await self._goes_on(found):
                if found != before:
                    self._gateway.whereabouts.found_at(found)
                    log.info(f"the coordinator is at {found}: this node goes on there")
                return
            if await self._goes_on(entrance.address):
                self._gateway.stay()
                log.info("the run's gateways lead to the coordinator: this node goes on through them")
                return
            await asyncio.sleep(LOOK_INTERVAL)

    async def _goes_on(self, address: str) -> bool:
        """Whether the coordinator is at this "host:port", and the control client with it."""
        try:
            await self._control.move(address)
        except AtollError:
            return False
        return True
