"""The node's manners towards its owner: it pauses when it is told to, or when the machine is not to be used; it
keeps to the rates, the amounts and the memory that it is given.

The pure part is `atoll.node.manners`. This shell asks the machine, keeps what the owner says, and has the node's
machine and its data plane follow.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.pause_reasons import PauseReason
from atoll.node.config import NodeConfig
from atoll.node.daemon.control_socket import Verb
from atoll.node.manners.byte_account import load_account, save_account
from atoll.node.manners.limits import KEYS, Orders, changed, limited, load_orders, save_orders, shown, wishes
from atoll.node.manners.may_train import Observations, Pause, byte_room, may_train
from atoll.node.manners.sensors import Sensors, check_observable
from atoll.node.memory import GIGABYTE
from atoll.node.state_machine import events as ev

log = logging.getLogger("atoll.node")
DECISION_INTERVAL = 1.0  # seconds
OBSERVATION_INTERVAL = 5.0  # seconds
SAVE_INTERVAL = 60.0  # seconds between two writes of what was exchanged, where no limit is on it
LONGEST_PAUSE = 366 * 86400.0  # seconds
LOOKS_TOO_LARGE = 2  # in a row at which the node took more memory than it may, before anything is done about it


class Manners:
    """What the owner of this machine wants, and what follows from it. `attach` it, then `run` it."""

    def __init__(self, config: NodeConfig, state_dir: Path, keys: Sequence[str] = KEYS) -> None:
        """`config`: as file and command line have it; `keys`: of the limits that this node can obey. Raises
        `ConfigError` for limits that cannot be."""
        self._base, self._state_dir, self._keys = config, state_dir, keys
        self._orders = load_orders(state_dir)
        self.config = limited(config, self._orders)
        self._wishes = wishes(self.config)
        self._account, self._counted = load_account(state_dir), 0  # bytes of this life that the account has
        self._saved = self._account
        self._seen, self._sensors = Observations(), Sensors()
        self._round, self._round_began, self._round_bytes = -1, 0, 0
        self._takes_part = True  # in that round: it was not paused all the time
        self._leaving, self._saved_at = False, -math.inf
        self._rests_until = -math.inf  # seconds; by when the rest is over that a step asks for
        self._memory_bytes, self._looks_too_large = 0, 0
        self.saves_bytes = False  # the node is to take part in no exchange for now
        self.reason: PauseReason | None = None
        self._traffic: Callable[[], int] = lambda: 0
        self._emit: Callable[[ev.Event], None] = lambda event: None
        self._follow: Callable[[NodeConfig], None] = lambda config: None
        self._fits: Callable[[NodeConfig], None] = lambda config: None
        self._memory: Callable[[], int] = lambda: 0
        self._shrink: Callable[[], object] = lambda: None

    @property
    def unobservable(self) -> str:
        """Which limit is on what this machine cannot tell now, as it may again; empty: none."""
        try:
            check_observable(self.config)
        except ConfigError as error:
            return f"{error}; until it can tell, the limit holds nothing back"
        return ""

    def attach(
        self,
        traffic: Callable[[], int],
        emit: Callable[[ev.Event], None],
        follow: Callable[[NodeConfig], None],
    ) -> None:
        """`traffic`: bytes that went up and down in this life; `emit` hands the node's machine an event; `follow`
        is called with the settings, now and when they change."""
        self._traffic, self._emit, self._follow = traffic, emit, follow
        follow(self.config)
        self.decide()

    def watch_memory(
        self, fits: Callable[[NodeConfig], None], memory: Callable[[], int], shrink: Callable[[], object]
    ) -> None:
        """`fits` raises for settings under which the node could not work; `memory`: bytes that it takes, which may
        be asked in a thread; `shrink` is called when it takes more than it may, and has been told to pause."""
        self._fits, self._memory, self._shrink = fits, memory, shrink

    # What it comes to

    @property
    def words(self) -> str:
        """Why the node may not train for now, and until when if that is known; empty: it may."""
        if self.reason is None:
            return ""
        until = self._until()
        return f"{self.reason.words}, until {clock_words(until)}" if until is not None else self.reason.words

    def room(self) -> float:
        """The bytes that may yet pass, up and down together, at this moment. At the last of them the node pauses,
        without waiting for the next look."""
        room = byte_room(self._wishes, self._observations(self._traffic() - self._counted))
        if room < 1 and not self.saves_bytes:
            self.decide()
        return room

    @property
    def counts_bytes(self) -> bool:
        """Whether the owner wants bytes saved: no more go over the link than an exchange needs."""
        return self.has_budget or not self.config.metered

    @property
    def has_budget(self) -> bool:
        return self._wishes.daily > 0 or self._wishes.monthly > 0

    def decide(self) -> None:
        """Look again whether the node may train."""
        if (changed := self._look()) is not None:
            self._emit(changed)

    def round_is(self, round_: int) -> ev.PauseChanged | None:
        """Note the round of the state that the node has come to: what the rounds before took, the next will.
        Returns the event of a pause, or of its end, that follows: a round that would not fit is not begun."""
        if round_ == self._round:
            return None
        if round_ == self._round + 1 and self._round >= 0 and self._takes_part:
            self._round_bytes = self._traffic() - self._round_began
        self._round, self._round_began, self._takes_part = round_, self._traffic(), False
        return self._look()

    def rest(self, seconds: float) -> None:
        """Take no steps for so long, as a step asks for by the share of the time in which the node may compute."""
        self._rests_until = time.monotonic() + seconds
        self.decide()

    def shrunk(self) -> None:
        """Its trainer is gone, with its memory: it is seen anew whether the node takes too much."""
        self._looks_too_large = 0
        self.decide()

    @property
    def _is_too_large(self) -> bool:
        return self._looks_too_large >= LOOKS_TOO_LARGE

    def _look(self) -> ev.PauseChanged | None:
        self._account_for_traffic()
        before, saved = self.reason, self.saves_bytes
        seen, now = self._observations(), datetime.now().astimezone()
        self.reason = may_train(self._wishes, seen, self._orders.pause, now, before, self._leaving)
        if self.reason is None and self._is_too_large:
            self.reason = PauseReason.MEMORY
        elif self.reason is None and time.monotonic() < self._rests_until:
            self.reason = PauseReason.RESTS
        self.saves_bytes = byte_room(self._wishes, seen) < 1
        self._takes_part = self._takes_part or self.reason is None
        if self.reason is not before and self.reason is not PauseReason.LEAVING:
            level = logging.DEBUG if PauseReason.RESTS in (before, self.reason) else logging.INFO
            log.log(
                level, f"the node pauses: {self.words}" if self.reason is not None else "the node trains again"
            )
        if (before is None) == (self.reason is None) and self.saves_bytes == saved:
            return None
        return ev.PauseChanged(self.reason is not None, self.saves_bytes)

    def status(self) -> dict[str, Any]:
        """For `atoll node status`."""
        account = self._account.at(datetime.now().date())
        more = self._traffic() - self._counted
        return {
            "paused": self.words,
            "limits": {key: value for key, value in shown(self.config).items() if key in self._keys}
            | {"disk": self.config.disk},
            "bytes_this_day": account.day_bytes + more,
            "bytes_this_month": account.month_bytes + more,
            "memory_bytes": self._memory_bytes,  # 0: it is not looked at
        }

    async def run(self) -> None:
        """Ask the machine and decide, every now and then, until cancelled."""
        observed_at = -math.inf
        try:
            while True:
                if time.monotonic() - observed_at >= OBSERVATION_INTERVAL:
                    self._seen = await asyncio.to_thread(self._sensors.observe, self.config)
                    await self._weigh()
                    observed_at = time.monotonic()
                self.decide()
                await asyncio.sleep(DECISION_INTERVAL)
        finally:
            self._account_for_traffic(ends=True)

    async def _weigh(self) -> None:
        """See how much memory the node takes."""
        if not self.config.memory:
            self._memory_bytes = self._looks_too_large = 0
            return
        self._memory_bytes = await asyncio.to_thread(self._memory)
        over = self._memory_bytes > self.config.memory * GIGABYTE
        self._looks_too_large = self._looks_too_large + 1 if over else 0
        if self._looks_too_large == LOOKS_TOO_LARGE:
            self.decide()
            self._shrink()

    # What the owner says

    @property
    def verbs(self) -> dict[str, Verb]:
        """The requests of the control socket."""
        return {"pause": self._pause, "resume": self._resume, "limits": self._limit}

    def leave_soon(self) -> None:
        """Take no more steps: the node goes when what it has is committed."""
        self._leaving = True
        self.decide()

    def _pause(self, arguments: Sequence[str]) -> dict[str, Any]:
        until = None
        if arguments:
            seconds = _number(arguments[0])
            if not 0 < seconds <= LONGEST_PAUSE:
                raise ConfigError(f"cannot pause for {seconds:g} s: it must be more than 0, and a year at most")
            until = time.time() + seconds
        self._keep(replace(self._orders, pause=Pause(until)))
        return {"paused": self.words}

    def _resume(self, arguments: Sequence[str]) -> dict[str, Any]:
        self._keep(replace(self._orders, pause=None))
        return {"paused": self.words}

    def _limit(self, arguments: Sequence[str]) -> dict[str, Any]:
        if arguments:
            try:
                self._keep(self._checked(arguments))
            except AtollError as error:
                if len(arguments) == 1:
                    raise
                raise type(error)(f"{error}; none of these {len(arguments)} limits was set") from None
        known = {key: value for key, value in shown(self.config).items() if key in self._keys}
        return {"limits": known, "told": sorted(self._orders.limits), "paused": self.words}

    def _checked(self, settings: Sequence[str]) -> Orders:
        """The orders with these KEY=VALUE, which this machine and its trainer can obey. Raises `AtollError`."""
        orders = changed(self._orders, settings, self._keys)
        config = limited(self._base, orders)
        touched = {setting.partition("=")[0] for setting in settings}
        check_observable(replace(NodeConfig(), **{key: getattr(config, key) for key in touched}))
        self._fits(config)
        return orders

    def _keep(self, orders: Orders) -> None:
        save_orders(self._state_dir, orders)
        self._orders = orders
        config = limited(self._base, orders)
        if config != self.config:
            told = (
                f"{key}={getattr(config, key)}"
                for key in KEYS
                if getattr(config, key) != getattr(self.config, key)
            )
            log.info(f"limits: {', '.join(told)}")
            self.config, self._wishes = config, wishes(config)
            self._follow(config)
        self.decide()

    # Details

    def _observations(self, more: int = 0) -> Observations:
        """What is known of the machine, with so many bytes that the account does not have yet."""
        now, traffic = self._account.at(datetime.now().date()), self._traffic()
        left = max(self._round_bytes - (traffic - self._round_began), 0)
        day, month = now.day_bytes + more, now.month_bytes + more
        return replace(self._seen, day_bytes=day, month_bytes=month, round_bytes=left)

    def _account_for_traffic(self, ends: bool = False) -> None:
        traffic = self._traffic()
        if traffic != self._counted:
            self._account = self._account.add(traffic - self._counted, datetime.now().date())
            self._counted = traffic
        due = ends or self.has_budget or time.monotonic() - self._saved_at >= SAVE_INTERVAL
        if self._account == self._saved or not due:
            return
        self._saved, self._saved_at = self._account, time.monotonic()
        try:
            save_account(self._state_dir, self._account)
        except OSError as error:
            log.debug(f"cannot keep what was exchanged: {error}")

    def _until(self) -> datetime | None:
        pause, hours = self._orders.pause, self._wishes.hours
        if self.reason is PauseReason.TOLD and pause is not None and pause.until is not None:
            return datetime.fromtimestamp(pause.until)
        if self.reason is PauseReason.HOURS and hours is not None:
            return hours.next_begin(datetime.now())
        return None


def clock_words(at: datetime) -> str:
    """A time of the clock on the wall, with its seconds where it has some."""
    return f"{at:%H:%M:%S on %a %d %b}" if at.second else f"{at:%H:%M on %a %d %b}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"cannot pause for {text!r}: give a number of seconds") from None
