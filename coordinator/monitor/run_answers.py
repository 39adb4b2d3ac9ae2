"""The answers about a run, living or recorded, as plain objects for JSON: what `web` serves and the terminal
shows.

Calls block: they read records, and are made in a thread. Every answer is bounded in bytes and in work. Raises
`ValueError` for a question that makes no sense, `NotThere` for what is not there, and `ResourceError`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from math import inf, isnan

import msgspec
import numpy as np

from atoll.comm.errors import AtollError
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.monitor import round_story
from atoll.coordinator.monitor.alerts import CONVICTIONS
from atoll.coordinator.monitor.blame import blame_of
from atoll.coordinator.monitor.contributions import DEFAULT_ACCOUNTS, MAX_ACCOUNTS
from atoll.coordinator.monitor.curves import CurvesAsked, curves, names_asked
from atoll.coordinator.monitor.event_search import (
    DEFAULT_EVENTS,
    MAX_EVENTS,
    MAX_SEARCH,
    found_events,
    is_routine,
    round_of,
)
from atoll.coordinator.monitor.figures import GONE_MEMORY
from atoll.coordinator.monitor.links import links
from atoll.coordinator.monitor.members import AtWork, is_here, mark_slow
from atoll.coordinator.monitor.node_story import (
    MAX_ADDED_UP,
    MAX_POINTS,
    NodeSeries,
    last_there,
    membership_change,
    node_series,
    rounds_to_add_up,
    rounds_to_read,
    time_spent,
)
from atoll.coordinator.monitor.pace import pace_of
from atoll.coordinator.monitor.period import period
from atoll.coordinator.monitor.recorded import recorded_snapshot
from atoll.coordinator.monitor.run_source import Answer, RunSource
from atoll.coordinator.state_machine.events import CommitRecord, Failure, Note

DEFAULT_RECORDS, MAX_RECORDS = 200, 1000  # commit records in an answer: where nothing is said, and at most
MAX_REST = 0.1  # seconds between two records of an answer
# Seconds that an answer waits for members to be served first, at most, and between two looks whether they are.
MAX_CALM_WAIT, CALM_POLL = 5.0, 0.02
MAX_ANSWER_BYTES = 8 << 20  # of commit records; a longer answer ends early, and the reader asks on from there
RECENT_EVENTS = 60  # that a look back at the run has
ROUND_EVENTS = 100  # that a round's own answer has
# Rounds after one in which something may be told of it: who failed in it is back. Notes that are looked at for it.
FAILURE_ROUNDS, MAX_ROUND_NOTES = 64, 5000
NODE_EVENTS, NODE_NOTES = 50, 5000  # that a node's has; notes that are looked at for them
MAX_BLAME, MAX_ABOUT = 200, 200  # verdicts, and decisions, of an answer; characters of what is asked about
MAX_PUT_OUT = 6  # members that were put out and are told of
MAX_NAMED_MARKS, MAX_CHANGES = 8, 500  # marks of an answer that name members; rounds whose change is remembered
RECORD_FIELDS = dict.fromkeys(CommitRecord.__struct_fields__)
Query = Mapping[str, str]


class NotThere(AtollError):
    """What is asked for is not there; a sentence."""


def passage_of(record: CommitRecord) -> Answer | None:
    """What the model wrote after the round, and on whose word; None: it was not asked to."""
    if (passage := record.passage) is None:
        return None
    name = record.names.get(passage.node, passage.node)
    return msgspec.structs.asdict(passage) | {"round": record.round, "name": name}


class RunAnswers:
    """The answers about one run. `query`: what was asked, by names."""

    def __init__(self, source: RunSource) -> None:
        self._source, self._records = source, source.records
        self._told: tuple[int, Answer] | None = None  # the last round, its story
        self._paces: tuple[int, dict[NodeId, float]] = (0, {})  # the last round whose record is complete
        self._read: tuple[int, Answer | None] = (0, None)  # a round with a validation loss, and what was written
        self._changes = dict[int, str]()  # by round: who came and went, in words

    @property
    def last(self) -> int:
        """The last round that is recorded; 0: none."""
        return self._records.series().last

    def current(self, said: Answer | None, at_work: Mapping[str, AtWork]) -> Answer:
        """The run now: what its source says (`RunSource.snapshot`), completed by what follows from the records."""
        last = self._records.series().last
        if said is None:
            return self.past(last)
        pending = self._source.pending()
        return self._with_story(said, at_work, self._source.now(), last, pending)

    def look_back(self, query: Query) -> Answer:
        """The run when `round` K was committed."""
        return self.past(_number(query, "round", 0))

    def past(self, number: int) -> Answer:
        """The run when round `number` was committed, or the last before. Raises `NotThere`."""
        rounds, at, losses = self._records.series().columns("round", "committed_at", "val_loss")
        end = int(np.searchsorted(rounds, number, "right"))
        if not end:
            raise NotThere(f"there is no round {number} yet" if len(rounds) else "no round is recorded yet")
        record = self._record(int(rounds[end - 1]))
        known = np.flatnonzero(np.isfinite(losses[:end]))
        loss = float(losses[known[-1]]) if len(known) else None
        said = recorded_snapshot(self._source.facts(), record, int(rounds[-1]), loss)
        said["events"] = found_events(self._records.iter_notes(record.committed_at + 1e-3), limit=RECENT_EVENTS)[
            "events"
        ][::-1]
        return self._with_story(said, {}, float(at[end - 1]), record.round)

    def _with_story(
        self,
        said: Answer,
        at_work: Mapping[str, AtWork],
        now: float,
        upto: int,
        pending: CommitRecord | None = None,
    ) -> Answer:
        """The answer, with what follows from the records: pace, losses, the last round's story, who is slow."""
        series = self._records.series()
        finished = said["phase"] == "finished"
        newest = pending if pending is not None and pending.round > upto else None
        pace = pace_of(series, said["rounds_total"], now, upto, newest)
        rounds, at, losses = series.columns("round", "committed_at", "train_loss")
        end = int(np.searchsorted(rounds, upto, "right"))
        known = np.flatnonzero(np.isfinite(losses[:end]))
        loss = float(losses[known[-1]]) if len(known) else None
        void = int(np.count_nonzero(series.column("void")[:end]))
        last = newest.round if newest is not None else int(rounds[end - 1]) if end else 0
        story = self._last_round(last) if last else None
        # The record of a round that is not complete says nothing of who trained how fast: until it does, the round
        # before judges.
        mark_slow(said["members"], at_work, self._paces_in(int(rounds[end - 1])) if end else {})
        return said | {
            "now": now,
            "events": self._with_names(said["events"]),
            "void_rounds": void,
            "put_out": self._put_out(said["members"], now),
            "live": self._source.live,
            "train_loss": newest.train_loss if newest is not None else loss,
            "pace": asdict(pace) | {"seconds_left": 0.0 if finished else pace.seconds_left},
            "ends_at": None if finished or pace.seconds_left is None else now + pace.seconds_left,
            "first_commit_at": float(at[0]) if len(at) else None,
            "last_commit_at": newest.committed_at if newest is not None else float(at[end - 1]) if end else None,
            "last_round": story,
            "passage": self._newest_passage(upto, newest),
            "last_recorded": int(rounds[-1]) if len(rounds) else 0,
        }

    def _paces_in(self, number: int) -> dict[NodeId, float]:
        """The tokens a second of who trained in a recorded round."""
        if number != self._paces[0]:
            try:
                self._paces = number, round_story.training_paces(self._record(number))
            except NotThere:  # its record is too old to be kept
                self._paces = number, {}
        return self._paces[1]

    def _last_round(self, number: int) -> Answer | None:
        """The story of a round; None: it is not there."""
        if self._told is not None and self._told[0] == number:
            return self._told[1]
        try:
            record = self._record(number)
        except NotThere:
            return None
        usual = round_story.usual_times(self._records.series(), record)
        told: Answer = {
            **{"round": number, "seconds": usual.took or sum(record.seconds.values()), "usual": usual.wall},
            **{"why": round_story.why(record, usual), "verdict": round_story.verdict_of(record, usual)},
            **{"reason": record.reason, "void": record.void},
        }
        if number <= self.last:  # else its record is not complete: its verdict is still to come
            self._told = number, told
        return told

    def _put_out(self, members: list[Answer], now: float) -> list[Answer]:
        """The latest members that were put out in the last day before `now` and are not back."""
        latest = {d.node: (at, d) for at, d in self._source.decisions(now - GONE_MEMORY, now)}
        here = {m["node_id"] for m in members if is_here(m)}
        found: list[Answer] = [
            {
                **{"node_id": node, "name": d.name or node, "consequence": d.consequence, "round": d.round},
                **{"at": at, "sentence": d.evidence.sentence},
            }
            for node, (at, d) in latest.items()
            if d.consequence in CONVICTIONS and node not in here
        ]
        return sorted(found, key=lambda one: -one["at"])[:MAX_PUT_OUT]

    def _with_names(self, events: list[Answer]) -> list[Answer]:
        """The events with the names of the nodes that they are about (empty: it is not known), and whether they
        are `routine`."""
        nodes = self._source.facts().nodes
        return [
            e
            | {"name": nodes[e["node"]].name if e["node"] in nodes else ""}
            | ({"routine": True} if is_routine(Note(e["sentence"])) else {})
            for e in events
        ]

    def _newest_passage(self, upto: int, newest: CommitRecord | None) -> Answer | None:
        """What the model wrote when its loss was last measured, by round `upto` or by the record behind it."""
        if newest is not None and newest.passage is not None:
            return passage_of(newest)
        rounds, losses = self._records.series().columns("round", "val_loss")
        measured = rounds[np.isfinite(losses) & (rounds <= upto)]
        number = int(measured[-1]) if len(measured) else 0
        if number != self._read[0]:
            try:
                self._read = number, passage_of(self._record(number)) if number else None
            except NotThere:  # its record is too old to be kept
                self._read = number, None
        return self._read[1]

    def rounds(self, query: Query) -> bytes:
        """Commit records as JSON: of the rounds after `since`, `limit` of them, with these `fields`."""
        since, limit = _number(query, "since", 0), _number(query, "limit", DEFAULT_RECORDS)
        if not limit:
            raise ValueError(f"limit=0 asks for nothing: give 1 to {MAX_RECORDS}")
        asked = query.get("fields", "")
        wanted = dict.fromkeys(asked.split(",")) if asked else RECORD_FIELDS
        if odd := sorted(wanted.keys() - RECORD_FIELDS.keys()):
            raise ValueError(f"a record has no {odd[0][:40]!r}")
        return self._rounds(since, min(limit, MAX_RECORDS), tuple(wanted))

    def _rounds(self, since: int, limit: int, wanted: tuple[str, ...]) -> bytes:
        """These fields of the commit records after `since`, as a JSON list: of the first `limit`, or of as many as
        `MAX_ANSWER_BYTES` allow. Between two of them it rests for as long as one takes, and while members wait:
        with a thousand of them that is tens of milliseconds, in which a coordinator does little else."""
        answer, length, began = list[bytes](), 0, time.monotonic()
        until = began + MAX_CALM_WAIT
        with closing(self._records.iter_rounds(since, limit)) as found:
            for record in found:
                answer.append(msgspec.json.encode({name: getattr(record, name) for name in wanted}))
                length += len(answer[-1])
                if length >= MAX_ANSWER_BYTES:
                    break
                time.sleep(min(time.monotonic() - began, MAX_REST))
                while self._source.crowded() and time.monotonic() < until:
                    time.sleep(CALM_POLL)
                began = time.monotonic()
        return b"[" + b",".join(answer) + b"]"

    def _record(self, number: int) -> CommitRecord:
        """Raises `NotThere`."""
        record = next(iter(self._records.iter_rounds(number - 1, 1)), None) if number > 0 else None
        if record is None and (record := self._source.pending()) is not None and record.round != number:
            record = None
        if record is None or record.round != number:
            raise NotThere(f"there is no record of round {number}")
        return record

    def round(self, query: Query, failures: Sequence[Failure] = ()) -> Answer:
        """One round: `round` K. Its record, and the story that it tells. `failures`: the latest of members."""
        record = self._record(_number(query, "round", 0))
        usual = round_story.usual_times(self._records.series(), record)
        took = round_story.seconds_of(record, usual)
        named = replace(record, names=self._names_of(record))
        return {
            "record": record,
            "seconds": took,
            "usual": usual,
            "names": named.names,
            "members": len(round_story.in_round(record)),
            "why": round_story.why(record, usual),
            "verdict": round_story.verdict_of(record, usual),
            "passage": passage_of(record),
            "waterfall": round_story.waterfall(named, took),
            "slow": round_story.slow_nodes(record),
            "failures": self._failures_now(record, failures),
            "events": self._with_names(self._events_of(record, took)),
            "last": self._records.series().last,
        }

    def _names_of(self, record: CommitRecord) -> dict[NodeId, str]:
        """The names in the record, and those of who was gone when it was made: from the one before, or as they are
        known now."""
        lacking = {*record.spent, *(f.node for f in record.failures)} - record.names.keys()
        if not lacking:
            return record.names
        before, facts = self._names_in(record.round - 1)[0], self._source.facts().nodes
        now = {node: facts[node].name for node in lacking & facts.keys() if facts[node].name}
        return record.names | now | {node: before[node] for node in lacking & before.keys()}

    def _failures_now(self, record: CommitRecord, latest: Sequence[Failure]) -> list[Failure]:
        """The failures that the record tells of, with what is known of them since: from the records of some rounds
        after it, and of those that are not committed yet from the `latest`."""
        found = {f.number: f for f in record.failures}
        open_ = {f.number: f for f in record.failures if f.recovered is None}

        def learn(told: Iterable[Failure]) -> None:
            for f in told:
                if (known := open_.get(f.number)) is not None and (known.node, known.at) == (f.node, f.at):
                    found[f.number] = f
                    if f.recovered is not None:
                        del open_[f.number]

        last = min(record.round + FAILURE_ROUNDS, self._records.series().last)
        for view in self._records.views(range(record.round + 1, last + 1) if open_ else ()):
            if not open_:
                break
            learn(view.failures)
        learn(latest)
        return list(found.values())

    def _events_of(self, record: CommitRecord, took: float) -> list[Answer]:
        """What was noted in the round, of other rounds aside, and what was noted of it later."""
        rounds, at = self._records.series().columns("round", "committed_at")
        behind = int(np.searchsorted(rounds, record.round + FAILURE_ROUNDS, "right"))
        until = float(at[behind]) if behind < len(at) else inf
        since, before = record.committed_at - took, record.committed_at + 1.0

        def of_it() -> Iterator[tuple[float, Note]]:
            for when, note in islice(self._records.iter_notes(until), MAX_ROUND_NOTES):
                if when < since:
                    return
                about = round_of(note)
                if about == record.round or (not about and when < before):
                    yield when, note

        found: list[Answer] = found_events(of_it(), limit=ROUND_EVENTS)["events"]
        return found

    def series(self, query: Query) -> Answer:
        """Curves: `names` over `x`, `from` and `to` of it, of `points` points."""
        asked = CurvesAsked(
            x=query.get("x", "round"),
            names=tuple(names_asked(query.get("names", ""))),
            start=_real(query, "from"),
            end=_real(query, "to"),
            points=_number(query, "points", CurvesAsked().points),
        )
        found = curves(self._records.series(), asked)
        return found | {"marks": self._with_who(found["marks"])}

    def _with_who(self, marks: list[Answer]) -> list[Answer]:
        """The marks, the latest of those on members with their names."""
        changes = [mark for mark in marks if mark["kind"] in ("gone", "joined")][-MAX_NAMED_MARKS:]
        for number in {mark["round"] for mark in changes} - self._changes.keys():
            before, after = self._names_in(number - 1, number)
            self._changes[number] = membership_change(before, after)
        while len(self._changes) > MAX_CHANGES:
            del self._changes[next(iter(self._changes))]
        said = {mark["round"]: self._changes.get(mark["round"], "") for mark in changes}
        return [
            m | {"text": f"round {m['round']:,}: {who}"} if (who := said.get(m["round"])) else m for m in marks
        ]

    def _names_in(self, *rounds: int) -> list[dict[NodeId, str]]:
        """The names of those in each of these rounds; empty where its record is not there."""
        found = {view.round: view.names for view in self._records.views(rounds)}
        return [found.get(number, {}) for number in rounds]

    def node(self, query: Query) -> Answer:
        """One node: `node` ID, in the rounds `from` to `to`, of which `points` are looked at."""
        node = NodeId(query.get("node", ""))
        last, points = self._records.series().last, _number(query, "points", MAX_POINTS)
        held = [(at, d) for at, d in self._records.decisions() if d.node == node]

        def read(end: int) -> tuple[NodeSeries, str]:
            first = max(_number(query, "from", max(end - MAX_POINTS + 1, 1)), 1)
            return node_series(self._records.views(rounds_to_read(first, end, points)), node)

        series, name = read(min(_number(query, "to", last), last))
        if not query.keys() & {"from", "to"} and last_there(series) is None:
            # It is gone: its own last rounds, as far as they are found.
            seen = self._last_round_of(node) or (held[-1][1].round if held else None)
            series, name = (series, name) if seen is None else read(min(seen, last))
        account = self._source.account(node)
        known = node in self._source.facts().nodes or last_there(series) is not None
        if account is None and not held and not known:
            raise NotThere(f"no node {node[:40]!r} is known")
        notes = islice(self._records.iter_notes(), NODE_NOTES)
        return {
            "node_id": node,
            "name": name or (account["name"] if account else held[-1][1].name if held else ""),
            "account": account,
            "standing": held[-1][1].consequence if held and held[-1][1].consequence in CONVICTIONS else "",
            "series": series,
            "spent": None if query.keys() & {"from", "to"} else self._spent(node, last_there(series)),
            "last": last,
            "evidence": [{"at": at} | msgspec.to_builtins(d) for at, d in held[-NODE_EVENTS:]],
            "events": self._with_names(
                [
                    {"at": at, "node": note.node, "sentence": note.sentence}
                    for at, note in notes
                    if note.node == node
                ][:NODE_EVENTS]
            ),
        }

    def _spent(self, node: NodeId, seen: int | None) -> Answer | None:
        """Where the node's time went in the latest rounds, or up to the last in which it was `seen` where none of
        them knows; None: no record does."""
        series = self._records.series()
        most = int(series.column("members")[-MAX_ADDED_UP:].max()) if len(series) else 0
        for end in dict.fromkeys((series.last, seen or 0)):
            rounds = rounds_to_add_up(end, most)
            rounds = rounds[-MAX_POINTS:] if self._source.live else rounds
            seconds, told = time_spent(self._records.views(rounds), node)
            if seconds:
                return {"first": told[0], "last": told[-1], "seconds": seconds}
        return None

    def _last_round_of(self, node: NodeId) -> int | None:
        """The last round in which the node was, by a look at some of all rounds, and at those behind the last of
        them that has it; None: none of them has."""
        first, end, seen = 1, self._records.series().last, None
        while rounds := rounds_to_read(first, end, MAX_POINTS):
            seen = last_there(node_series(self._records.views(rounds), node)[0]) or seen
            if seen is None or len(rounds) < 2 or (step := rounds[1] - rounds[0]) == 1:
                break
            first, end = seen + 1, min(seen + step - 1, end)
        return seen

    def events(self, query: Query) -> Answer:
        """What was noted `after` a time and `before` another, with all words of `search`; `limit` of it, `routine`
        (1) with what is noted of any round. Where both times are given, `period`: the rounds in between."""
        before, after = _real(query, "before"), _real(query, "after")
        limit = min(max(_number(query, "limit", DEFAULT_EVENTS), 1), MAX_EVENTS)
        notes, routine = self._records.iter_notes(inf if before is None else before), query.get("routine", "0")
        if routine not in ("0", "1"):
            raise ValueError(f"routine={routine[:40]!r}: give 0 or 1")
        words = query.get("search", "")[:MAX_SEARCH]
        found = found_events(notes, words, after or 0.0, limit, routine == "1")
        between = None if after is None or before is None else period(self._records.series(), after, before)
        return found | {"events": self._with_names(found["events"]), "period": between}

    def blame(self, query: Query) -> Answer:
        """The latest verdicts on rounds and decisions against members `about` a round, a node, or all."""
        if len(about := query.get("about", "")) > MAX_ABOUT:
            raise ValueError(f"about={about[:40]!r}... is no round, name or key: {MAX_ABOUT} characters at most")
        found = blame_of(self._records, self._source.facts().run, about, MAX_BLAME)
        return {name: getattr(found, name) for name in ("run", "verdicts", "decisions", "seconds", "left_out")}

    def links(self, query: Query) -> Answer:
        """Regions and links now, or as the plan of `round` had them."""
        number = _number(query, "round", 0) or self._records.series().last
        record = self._record(number) if number else None
        return links(record, {} if "round" in query else self._source.round_trips())

    def contributions(self, query: Query) -> Answer:
        """The accounts of owners and nodes: `limit` of each, behind the first `offset`. Raises `ValueError`."""
        limit = _number(query, "limit", DEFAULT_ACCOUNTS)
        if not limit:
            raise ValueError(f"limit=0 asks for nothing: give 1 to {MAX_ACCOUNTS}")
        return self._source.contributions(limit, _number(query, "offset", 0))


def _number(query: Query, name: str, default: int) -> int:
    """The number of this name. Raises `ValueError` with a sentence."""
    return _whole(query.get(name, str(default)), name)


def _whole(given: str, name: str) -> int:
    if not (given.isascii() and given.isdecimal()) or len(given) > 18:
        raise ValueError(f"{name}={given[:40]!r} is not a number")
    return int(given)


def _real(query: Query, name: str) -> float | None:
    given = query.get(name, "")
    if not given:
        return None
    try:
        value = float(given) if len(given) <= 40 else float("nan")
    except ValueError:
        value = float("nan")
    if isnan(value):
        raise ValueError(f"{name}={given[:40]!r} is not a number")
    return value
