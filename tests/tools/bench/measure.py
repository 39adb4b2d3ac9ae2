"""Takes the measurements: each function runs processes, and returns what came out of them, failures included."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench import gloo, tcp
from bench.cases import (
    AUDITED_NUMELS,
    AUDITS,
    AUDITS_COST,
    CODEC,
    FLEET,
    HOME,
    PLAN,
    REGIONS,
    TIMES,
    TRAINER,
    WAN,
    Case,
    Failed,
    Measured,
    Outcome,
    Row,
    outcome,
    spread,
)
from bench.command import ATOLL, ask, shown
from bench.wan import Wan, WanError, unavailable

LEARNT = 3  # rounds after which nodes know what they can send to other regions
ENOUGH_MEMBERS = 1000  # for the bars of a coordinator
# A model whose step takes about 0.1 s on one core.
TRAINED = ("model.dim=256", "model.ffn_dim=688", "inner.batch_size=8")
STEPS_IN_TURN, LONGEST_STEP = 10, 2.0  # seconds
START_UP = 120.0  # seconds for all processes of a run
SLOWEST = 10  # times the links' limit: an iteration that takes longer is given up
LOOPBACK_PATIENCE = 60.0  # seconds of an iteration without limited links
Say = Callable[[str], None]  # what is being done now


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    times: int = TIMES  # measured iterations, or turns of an interleaved comparison
    in_turn: int = 2  # iterations in a turn
    share: float = 1.0  # of the vector
    seconds: float = 8.0  # of plain TCP
    members: int = 1000  # of the coordinator
    period: float = 56.0  # seconds of their inner steps: with the reports, a round a minute
    turns: int = 12  # of the trainer and of the loop beside it


QUICK = Size(times=2, in_turn=1, share=0.08, seconds=3.0, members=50, period=2.0, turns=2)


@dataclass(frozen=True, slots=True)
class Bench:
    size: Size
    atoll: Sequence[str] = ATOLL
    settings: tuple[str, ...] = ()  # overrides of the run

    def case(self, case: Case, say: Say) -> Measured:
        """All iterations of a case."""
        case = case.scaled(self.size.share)
        words = self._words(case)
        measured = Measured(case, command=shown(words))
        if case.link is not None and (why := unavailable()):
            return replace(measured, left_out=why)
        try:
            with ExitStack() as stack:
                if case.link is not None:
                    _join(stack, case)
                return self._in_turns(measured, words, say)
        except WanError as error:
            return replace(measured, failure=str(error))

    def _in_turns(self, measured: Measured, words: Sequence[str], say: Say) -> Measured:
        """Loopback: gloo, ours, gloo, ours: the machine's moods hit both. Else one run, or one for each death."""
        case = measured.case
        turns = self.size.times if case.link is None or case.kill else 1
        for turn in range(turns):
            try:
                if case.link is None:
                    say(f"{case.key}: gloo, {turn + 1} of {turns}")
                    seconds = gloo.measure(case.peers, case.numel, self.size.in_turn, patience=LOOPBACK_PATIENCE)
                    measured = replace(measured, gloo=(*measured.gloo, tuple(seconds)))
                say(f"{case.key}: atoll, {turn + 1} of {turns}")
                measured = replace(measured, outcomes=(*measured.outcomes, self._run(case, words)))
            except (Failed, gloo.GlooFailed) as error:
                return replace(measured, failure=str(error))
        return measured

    def _words(self, case: Case, warmup: int = 1) -> list[str]:
        far = case.link is not None or case.key == REGIONS.key
        at_once = far and case.key != AUDITS.key  # not in turns
        iters = 1 if case.kill else self.size.times if at_once else self.size.in_turn
        words = ["bench", "allreduce", "--peers", str(case.peers), "--numel", str(case.numel), "--codec", "int8"]
        words += ["--iters", str(iters), "--warmup", str(warmup), "--timeout", f"{_patience(case):g}"]
        if far:
            wan = Wan(case.peers + 1)
            words += ["--host", wan.host_template, "--launch-prefix", wan.launch_template]
        if case.kill:
            words += ["--kill-peer", str(case.peers), "--kill-at", "0.5"]
        return [*words, "--json", *self.settings]

    def _run(self, case: Case, words: Sequence[str]) -> Outcome:
        iterations = 2 if case.kill else self.size.times + LEARNT
        told = ask(words, START_UP + iterations * _patience(case), self.atoll)
        return outcome(told, killed=case.peers if case.kill else 0)

    def regions(self, say: Say) -> list[Row]:
        """The same members and links with flat plans only, and with what the planner chooses."""
        case = REGIONS.scaled(self.size.share)
        ways: tuple[tuple[str, list[str]], ...] = (("flat", ["reduce.levels=1"]), ("as planned", []))
        rows = []
        for way, settings in ways:
            words = [*self._words(case, LEARNT), *settings]
            row = Row(case.key, f"{case.full_title}, {way}", "s", command=shown(words))
            if why := unavailable():
                rows.append(replace(row, left_out=why))
                continue
            say(f"{case.key}: {way}")
            try:
                with _regions(case.peers):
                    told = self._run(case, words)
                note = f"levels {', '.join(map(str, told.levels))}"
                rows.append(replace(row, values=told.seconds, note=note))
            except (Failed, WanError) as error:
                rows.append(replace(row, failure=str(error)))
        return rows

    def audits(self, say: Say) -> list[Row]:
        """By how much a reduce, from its plan to its commit, is longer with the audits of a run's defaults, in
        turns with one without."""
        rows = []
        for numel in AUDITED_NUMELS:
            limit = AUDITS.limit * numel / AUDITS.numel
            case = replace(AUDITS, numel=numel, limit=limit).scaled(self.size.share)
            words = self._words(case)
            title = f"longer for audits, {case.full_title}"
            row = Row(case.key, title, "%", must=AUDITS_COST, command=shown([*words, "security.audit=auto"]))
            if why := unavailable():
                rows.append(replace(row, left_out=why))
                continue
            try:
                rows.append(self._audited(row, case, words, say))
            except (Failed, WanError) as error:
                rows.append(replace(row, failure=str(error)))
        return rows

    def _audited(self, row: Row, case: Case, words: Sequence[str], say: Say) -> Row:
        longer, plain = list[float](), list[float]()
        with ExitStack() as stack:
            _join(stack, case)
            for turn in range(self.size.times):
                say(f"{case.key}: {case.numel / 1e6:g}M, {turn + 1} of {self.size.times}")
                took = [self._to_commit(case, [*words, f"security.audit={audit}"]) for audit in ("0", "auto")]
                plain.append(took[0])
                longer.append(100 * (took[1] / took[0] - 1))
        return replace(row, values=tuple(longer), note=f"{spread(plain)} s without")

    def _to_commit(self, case: Case, words: Sequence[str]) -> float:
        """Seconds of a round's reduce in the middle, the warm-up left out."""
        told = ask(words, START_UP + (self.size.times + LEARNT) * _patience(case), self.atoll)
        outcome(told)  # that all went well
        try:
            seconds = zip(told["reduce_s"], told["commit_s"], strict=True)
            return median([float(a) + float(b) for a, b in seconds][1:])
        except (KeyError, TypeError, ValueError) as error:
            raise Failed(f"its JSON is not as documented: {error!r}") from None

    def codec(self, say: Say) -> list[Row]:
        """Nanoseconds of the int8 codec for an element, on one thread, and the error of its means."""
        words = ["bench", "codec", "--json"]
        bars = (
            ("int8 encode", "encode", "ns", 0.5, 0.25),
            ("int8 decode and accumulate", "accumulate", "ns", 0.25, 0.12),
            ("error of the int8 mean, normal, N=4", "normal_4", "%", 0.9, 0.8),
            ("error of the int8 mean, normal, N=16", "normal_16", "%", 0.9, 0.75),
            ("error of the int8 mean, Student-t(3), N=16", "t3", "%", 2.5, 1.8),
        )
        values: list[dict[str, float]] = []
        try:
            for turn in range(self.size.times):
                say(f"{CODEC}: codec, {turn + 1} of {self.size.times}")
                values.append(codec_figures(ask(words, 120, self.atoll), "int8"))
        except Failed as error:
            return [Row(CODEC, "int8 codec", "ns", command=shown(words), failure=str(error))]
        return [
            Row(CODEC, title, unit, tuple(v[key] for v in values), must, aim, command=shown(words))
            for title, key, unit, must, aim in bars
        ]

    def fleet(self, say: Say) -> list[Row]:
        """What a coordinator needs for many members, on one core of this machine beside them."""
        members, period = self.size.members, self.size.period
        words = ["bench", "coordinator", f"--members={members}", f"--period={period:g}", "--rounds=2", "--json"]
        bars = (
            (f"control time of {members:,} members, p99", "control_ms_p99", "ms", 1.0, 250.0),
            (f"coordinator of {members:,} members, of a core", "cpu_share", "%", 100.0, 30.0),
            (f"coordinator of {members:,} members, memory", "rss_mb", "MB", 1.0, 130.0),
        )
        say(f"{FLEET}: coordinator, {members:,} members")
        try:
            told = fleet_figures(ask(words, 300 + 3 * period, self.atoll))
        except Failed as error:
            return [Row(FLEET, bars[0][0], "ms", command=shown(words), failure=str(error))]
        with_bars = members >= ENOUGH_MEMBERS
        return [
            Row(FLEET, title, unit, (scale * told[key],), must if with_bars else None, command=shown(words))
            for title, key, unit, scale, must in bars
        ]

    def trainer(self, say: Say) -> list[Row]:
        """What the built-in trainer needs beyond a bare loop of the same model, in turns on one core."""
        turns = self.size.turns
        words = ["bench", "trainer", "--engines=builtin,bare", f"--steps={STEPS_IN_TURN * turns}"]
        words += [f"--turns={turns}", "--node=device=cpu", "--node=threads=1", "--json", *TRAINED]
        title, memory = "trainer, longer than a bare loop", "trainer, memory beyond model, optimizer and vectors"
        say(f"{TRAINER}: trainer, {turns} turns")
        try:
            seconds = START_UP + 2 * turns * STEPS_IN_TURN * LONGEST_STEP
            told = trainer_figures(ask(words, seconds, self.atoll))
        except Failed as error:
            return [Row(TRAINER, title, "%", command=shown(words), failure=str(error))]
        note = f"{spread(told.paces)} tokens/s"
        return [
            Row(TRAINER, title, "%", told.longer, 2.0, note=note, command=shown(words)),
            Row(TRAINER, memory, "MB", (told.beyond_mb,), 500.0, command=shown(words)),
        ]

    def plan(self, say: Say) -> tuple[list[Row], dict[str, list[dict[str, Any]]]]:
        """Predicted seconds for many members; nothing if this atoll does not predict."""
        words = ["bench", "plan", "--json"]
        say(f"{PLAN}: predictions")
        try:
            return [], plan_rows(ask(words, 300, self.atoll))
        except Failed as error:
            return [Row(PLAN, "predicted reduce", "s", command=shown(words), failure=str(error))], {}

    def emulator(self, say: Say) -> list[Row]:
        """What the emulated network carries without atoll: the ground that the other figures stand on."""
        if why := unavailable():
            return [Row(WAN, "the emulator", "Mbit/s", left_out=why)]
        try:
            found = [
                self._plain_tcp(say, "4 streams one way, 100 Mbit/s, 50 ms", Wan(2, **_shape(100, 50)), [1]),
                self._plain_tcp(say, "4 at once, 100 Mbit/s, 50 ms", Wan(4, **_shape(100, 50)), [1, 2, 3, 4]),
                self._plain_tcp(
                    *(say, "4 at once, 1 Gbit/s, 100 ms, 0.01 %", Wan(4, **_shape(1000, 100, 0.01)), [1, 2, 3, 4])
                ),
                self._gloo_far(say),
            ]
        except (WanError, gloo.GlooFailed) as error:
            return [Row(WAN, "the emulator", "Mbit/s", failure=str(error))]
        return found

    def _plain_tcp(self, say: Say, title: str, wan: Wan, senders: Sequence[int]) -> Row:
        say(f"{WAN}: {title}")
        with wan:
            flow = tcp.measure(wan, senders, 4, self.size.seconds)
        receivers = [i for i in range(wan.n) if set(senders) - {i + 1}]
        note = f"emulator {flow.cpu:.2f} cores, {flow.late_mean_ms:.1f} ms late"
        return Row(WAN, f"TCP, {title}", "Mbit/s", tuple(flow.wire[i] for i in receivers), note=note)

    def _gloo_far(self, say: Say) -> Row:
        say(f"{WAN}: gloo")
        peers, numel = 4, int(5_000_000 * self.size.share)
        bound = 2 * (peers - 1) / peers * numel * 4 * 8 / (HOME.mbit * 1e6)
        with Wan(peers, **_shape(HOME.mbit, HOME.rtt)) as wan:
            prefixes = [wan.prefix(i) for i in range(1, peers + 1)]
            seconds = gloo.measure(peers, numel, self.size.times, prefixes=prefixes, patience=20 * bound + 60)
        title = f"gloo fp32, {peers} peers, {numel / 1e6:g}M, 100 Mbit/s, 50 ms"
        return Row(WAN, title, "s", tuple(seconds), note=f"the links' limit is {bound:.2f} s")


def codec_figures(told: dict[str, Any], name: str) -> dict[str, float]:
    """Encode and accumulate ns of one codec, and its errors in percent."""
    try:
        row = told["codecs"][name]
        ns = {"encode": float(row["encode_ns"]), "accumulate": float(row["decode_accumulate_ns"])}
        errors = {"normal_4": "rel_err_normal_4", "normal_16": "rel_err_normal_16", "t3": "rel_err_t3"}
        return ns | {key: 100 * float(row[field]) for key, field in errors.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise Failed(f"its JSON tells nothing of {name}: {error!r}") from None


@dataclass(frozen=True, slots=True)
class TrainerFigures:
    longer: tuple[float, ...]  # percent, of each turn beside a bare loop's
    paces: tuple[float, ...]  # tokens a second of each turn
    beyond_mb: float


def trainer_figures(told: dict[str, Any]) -> TrainerFigures:
    """The built-in trainer's figures beside the bare loop's, whose loss must be the same."""
    try:
        ours, bare = told["engines"]["builtin"], told["engines"]["bare"]
        pairs = zip(ours["turns"], bare["turns"], strict=True)
        longer = tuple(100 * (theirs / own - 1) for own, theirs in pairs)
        if abs(ours["loss"] - bare["loss"]) > 0.05 * bare["loss"]:
            raise Failed(f"a loss of {ours['loss']:.3f} beside one of {bare['loss']:.3f}")
        return TrainerFigures(longer, tuple(ours["turns"]), ours["beyond_bytes"] / 1e6)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Failed(f"its JSON is not as documented: {error!r}") from None


def fleet_figures(told: dict[str, Any]) -> dict[str, float]:
    """Control time in ms, share of a core, and MB of a coordinator."""
    try:
        return {key: float(told[key]) for key in ("control_ms_p99", "cpu_share", "rss_mb")}
    except (KeyError, TypeError, ValueError) as error:
        raise Failed(f"its JSON is not as documented: {error!r}") from None


def plan_rows(told: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Predictions by the name of their scenario, which may be one without a name."""
    try:
        scenarios = told["scenarios"] if "scenarios" in told else [{"name": "", "rows": told["rows"]}]
        fields = ("n", "flat_s", "two_level_s", "chosen")
        return {s["name"]: [{key: row[key] for key in fields} for row in s["rows"]] for s in scenarios}
    except (KeyError, TypeError) as error:
        raise Failed(f"its JSON is not as documented: {error!r}") from None


def _join(stack: ExitStack, case: Case) -> None:
    """The network of a case. The coordinator is one more node with the same link."""
    assert case.link is not None
    wan = Wan(case.peers + 1, **_shape(case.link.mbit, case.link.rtt, case.link.loss))
    stack.enter_context(wan)
    if case.link.slowest:
        wan.set(case.peers, up=case.link.slowest, down=case.link.slowest)


@contextmanager
def _regions(peers: int) -> Iterator[None]:
    """Half of the peers near each other, and the coordinator; far from them the other half."""
    with Wan(peers + 1, **_shape(300, 4)) as wan:
        for i in range(1, peers + 2):
            wan.set(i, region=2 if peers / 2 < i <= peers else 1, far=76, between=100)
        yield


def _shape(mbit: float, rtt: float, loss: float = 0.0) -> Any:
    return {"up": mbit, "down": mbit, "rtt": rtt, "loss": loss}


def _patience(case: Case) -> float:
    """Seconds that an iteration may take."""
    return max(LOOPBACK_PATIENCE, SLOWEST * (case.limit or 3.0))
