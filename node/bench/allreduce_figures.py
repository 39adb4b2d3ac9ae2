"""The settings of `atoll bench allreduce`, and the figures that follow from its peers' reports. Pure."""

import shlex
from dataclasses import dataclass, field
from typing import Any

from atoll.comm.errors import BenchFailed
from atoll.comm.invite import join_host_port
from atoll.node.bench.synthetic import Compare, Decoded, PeerReady, RoundBegun

FP32 = 4  # bytes of an element


@dataclass(frozen=True, slots=True)
class AllreduceBench:
    """The settings of one measurement."""

    peers: int
    numel: int
    codec: str
    iters: int
    warmup: int  # rounds before the first iteration
    streams: int  # TCP streams between two peers; 0: automatic
    threads: int  # of each peer that encode and merge
    host: str  # {i} is the peer's number
    prefix: str  # of each peer's command, likewise
    victim: int  # peer to kill; 0: none
    kill_at: float  # of an iteration's usual time
    timeout: float  # seconds for one iteration
    overrides: tuple[str, ...]

    @property
    def rounds(self) -> range:
        """The rounds of the run: those of the warm-up, then the iterations."""
        return range(1, self.warmup + self.iters + 1)

    def command_prefix(self, number: int) -> list[str]:
        """The words before the command of peer `number`. Raises `ValueError` where they have no closing
        quotation."""
        return [word.replace("{i}", str(number)) for word in shlex.split(self.prefix)]

    def listen_address(self, number: int) -> str:
        """The address on which peer `number` listens, HOST:0: any port."""
        return join_host_port(self.host.replace("{i}", str(number)), 0)


@dataclass(frozen=True, slots=True)
class AllreduceFigures:
    """The figures that are printed; lists of peers are in the order of their numbers."""

    peers: int
    numel: int
    codec: str
    streams: int
    threads: int  # of each peer that encode and merge
    seconds: list[float | None]  # of each iteration; None: it was not committed
    rel_err: float | None  # of the last iteration
    digests_equal: bool  # in every round
    tx_bytes: list[int]  # of each peer, in the last iteration that nobody died in
    rx_bytes: list[int]
    committed: list[bool]  # by every peer that lives
    killed: list[int]
    killed_late: bool  # it had the result before: its death was not in the way
    predicted_s: list[float]  # by the plans; 0: nothing was known of the links
    levels: list[int]  # 2: planned in two levels
    predictions: list[dict[str, float]]  # seconds, of the plans that there were to choose from
    shares: list[dict[str, float]]  # of the chunks that each peer owned, by node id
    rates: dict[str, tuple[float, float]]  # bytes a second up and down, as the last plan had them
    reduce_s: list[float]  # from the plan to the last seal, by the coordinator's clock
    commit_s: list[float]  # from the last seal to the commit, which waits for audits, by the same clock
    audit: str  # `security.audit`; 0: contributions were not signed, and nothing was audited
    attempts: list[int]
    tx_bytes_killed: list[int | None]  # of each survivor, in the iteration that a peer died in
    rx_bytes_killed: list[int | None]
    cpu_s: list[float]  # of each peer, in the measured part of the same iteration as tx_bytes
    rss_peak_mb: list[float]  # of each peer, its vectors included
    beyond_mb: list[float]  # of each peer, without its vectors and what its process has before the first round
    vector_mb: float
    payload_mb: float  # of one encoded vector


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """One round of one peer, from its reports."""

    begun: RoundBegun | None
    decoded: Decoded | None  # None: it did not get the mean from the reduce
    before: PeerReady
    after: PeerReady | None  # None: it was killed

    @property
    def tx(self) -> int | None:
        return None if self.after is None else self.after.bytes_up - self.before.bytes_up

    @property
    def rx(self) -> int | None:
        return None if self.after is None else self.after.bytes_down - self.before.bytes_down

    @property
    def cpu(self) -> float:
        return 0.0 if self.begun is None or self.decoded is None else self.decoded.cpu - self.begun.cpu


@dataclass
class BenchHistory:
    """The rounds of a run so far."""

    rounds: list[dict[int, RoundTiming]] = field(default_factory=list)  # of each round, by the peers' numbers
    killed: list[int] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)  # the coordinator's, of every round
    rel_err: float | None = None
    audit: str = ""  # the run's `security.audit`


def duration(timings: dict[int, RoundTiming]) -> float | None:
    """Seconds from the last input to the last result; None if a peer that lives has none."""
    begun = [timing.begun.at for timing in timings.values() if timing.begun is not None]
    decoded = [
        timing.decoded.at if timing.decoded else None for timing in timings.values() if timing.after is not None
    ]
    times = [at for at in decoded if at is not None]
    return max(times) - max(begun) if begun and times and len(times) == len(decoded) else None


def comparison(record: dict[str, Any], numbers: dict[str, int]) -> Compare:
    """The order to compare a mean with what arrived, as the commit record has it; `numbers`: peers by their
    ids."""
    # All bring as much; who died weighs less in the record, by the part of the vector that has its delta.
    weights = {numbers[node]: 1.0 for node in record["contributors"]}
    lacking = {int(c): tuple(numbers[node] for node in nodes) for c, nodes in record["lacking"].items()}
    return Compare(record["round"], weights, lacking)


def shortfall(history: BenchHistory) -> BenchFailed | None:
    """The error of a run that came to its end, if a peer lacks the mean or states differ; None: all is well."""
    for round_, timings in enumerate(history.rounds, 1):
        late = [n for n, timing in timings.items() if timing.after is not None and timing.decoded is None]
        if late:
            return BenchFailed(
                f"peer {late[0]} fetched the state of round {round_}: it did not get the mean in time"
            )
    for record in history.records:
        if not record["digests_equal"]:
            return BenchFailed(f"the peers' states differ after round {record['round']}")
    return None


def summarise(bench: AllreduceBench, history: BenchHistory) -> AllreduceFigures:
    """The figures of a run, of which at least one round was seen; traffic is that of the last round without a
    death."""
    measured = history.rounds[bench.warmup :]
    seconds = [duration(timings) for timings in measured] + [None] * (bench.iters - len(measured))
    records = history.records[bench.warmup :]
    full = [timings for timings in history.rounds if all(timing.after is not None for timing in timings.values())]
    whole = full[-1] if full else {}
    cut = history.rounds[-1] if history.rounds[-1] is not whole else {}
    ready = [timing.after or timing.before for timing in history.rounds[-1].values()]
    return AllreduceFigures(
        peers=bench.peers,
        numel=bench.numel,
        codec=bench.codec,
        streams=bench.streams,
        threads=bench.threads,
        seconds=seconds,
        rel_err=history.rel_err,
        digests_equal=bool(history.records) and all(record["digests_equal"] for record in history.records),
        tx_bytes=[timing.tx or 0 for timing in whole.values()],
        rx_bytes=[timing.rx or 0 for timing in whole.values()],
        committed=[took is not None for took in seconds],
        killed=history.killed,
        killed_late=any(
            timing.decoded is not None for timing in history.rounds[-1].values() if timing.after is None
        ),
        reduce_s=[record["seconds"]["reduce"] for record in records],
        predicted_s=[record["predicted"] for record in records],
        levels=[record["levels"] for record in records],
        predictions=[record["predictions"] for record in records],
        shares=[record["shares"] for record in records],
        rates=records[-1]["rates"] if records else {},
        commit_s=[record["seconds"]["commit"] for record in records],
        audit=history.audit,
        attempts=[record["attempts"] for record in records],
        tx_bytes_killed=[timing.tx for timing in cut.values()],
        rx_bytes_killed=[timing.rx for timing in cut.values()],
        cpu_s=[timing.cpu for timing in whole.values()],
        rss_peak_mb=[report.rss_peak / 1e6 for report in ready],
        beyond_mb=[report.beyond / 1e6 for report in ready],
        vector_mb=FP32 * bench.numel / 1e6,
        payload_mb=ready[0].payload / 1e6,
    )
