"""The members of a run, and what their clocks say of them. Pure.

    joining --layout--> recovering --state_k--> synced --round boundary--> active
       |                    ^                      |                         |
       |                    +------ differs -------+-------------------------+
       |
       +--- does not come back after it was suspected, or hangs ---> evicted       says good-bye --> left

In any state a member may be suspected: its connection broke, or it is silent for half a lease. When it is heard it
is trusted again, in the state that it has then.

No round waits for a suspect once a quorum is there, and no plan names it where enough others are left. A member
that a round waited for in vain before its trainer had taken a step is *idle*: it is no part of a quorum, and no
round waits for it, until it takes one. The same goes for one that is *paused*, as it says, until it has taken a
step after that: who says so again and again delays no round. What it contributes is taken as ever; but from one
that *saves bytes*, too, nothing comes and nothing can be fetched until it says otherwise (`byte_saving`). Times
are the coordinator's.
"""

from collections.abc import Container, Iterable
from enum import StrEnum

from msgspec import Struct

from atoll.comm.config.run import MembersConfig
from atoll.comm.ids import NO_KEY, NO_PIN, NodeId, Pin, PublicKey
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.events import (
    Event,
    Expired,
    Heartbeat,
    Paused,
    Resumed,
    Stepped,
    Suspected,
    SuspicionCleared,
)

# Members have so long to find a coordinator that was started again; their backoff ends below.
RECONNECT_GRACE_SECONDS = 5.0
MAX_DEPARTED = 1000  # members that are gone
PAUSE_INTERVAL_SECONDS = 5.0  # between two pauses of a member that the journal hears of, at least
REDUCER = "reducer"  # the role; any other trains
VERIFIER = "verifier"  # the role of who replays others' rounds, and contributes nothing


class MemberState(StrEnum):
    """Stage of a member on its way through the run; the drawing is at the top."""

    JOINING = "joining"  # its trainer is starting
    RECOVERING = "recovering"  # fetches the live state from its peers
    SYNCED = "synced"  # has the state and trains; counted from the next round boundary on
    ACTIVE = "active"  # counted in the round
    REDUCER = "reducer"  # has no trainer: owns chunks of a reduce, and nothing else
    LEFT = "left"
    EVICTED = "evicted"


TRAINABLE_STATES = (MemberState.SYNCED, MemberState.ACTIVE)  # to train a round


class Member(Struct, frozen=True, gc=False):
    """One life of a node in the run, with what it told and what was measured of it."""

    node: NodeId
    life: int  # the number of its joins; what an earlier life still sends is refused
    name: str
    address: str  # data plane
    session: str
    state: MemberState
    heard_at: float  # seconds
    moved_at: float  # seconds; when its inner step last advanced, not counting when nobody waited for it
    stuck: float = 0.0  # seconds without an advance, when the run last stopped waiting for it
    connected: bool = True
    suspect_at: float = 0.0  # seconds; while it is not connected: when it becomes a suspect,
    expire_at: float = 0.0  # and when it is out
    state_round: int = -1  # the state it holds, -1: none
    state_digest: bytes = b""
    pace: float = 0.0  # inner steps a second in its last round; 0: not measured yet
    usual_pace: float = 0.0  # the same, of the rounds before that, about
    fastest: float = 0.0  # the same, of the rounds that counted its work: the highest, less with each since
    counted_at: float = 0.0  # seconds; since when it may have taken the steps that no commit has yet
    missed: int = 0  # rounds whose commits left its work out, which it may still bring
    turns: int = 0  # rounds in a row that its slow link kept it out of
    phase: str = "starting"  # what its heartbeat says it is doing
    step: tuple[int, int] = (0, 0)  # (round, inner step) of its last heartbeat
    step_before: tuple[int, int] = (0, 0)  # the same, of its earlier life
    stepped: bool = False  # its trainer has taken an inner step in this life
    idle: bool = False  # was waited for in vain, or paused, and has taken no inner step since
    paused: bool = False  # takes no inner steps, as it says
    # exchanges nothing with peers, as it says. Invariant: then it is paused, too
    saves_bytes: bool = False
    says_paused: bool = False  # the two, as its last heartbeat has them
    says_saves_bytes: bool = False
    paused_at: float = -PAUSE_INTERVAL_SECONDS  # seconds; when it last paused, or began to save bytes
    reason: str = ""  # for its state
    suspected: str | None = None  # why it may be dead; None: it is trusted
    evaluates: bool = True  # its trainer can measure a validation loss
    leaf: bool = False  # nobody can dial it
    role: str = ""  # "reducer": owns chunks, has no trainer
    late: bool = False  # a reducer that did not finish in time: it owns chunks again if nobody else can be dialled
    up: float = 0.0  # bytes a second that its link carries, as it tells; 0: not known
    down: float = 0.0
    seen_up: float = 0.0  # the same, as those saw it who received from it, and who sent to it
    seen_down: float = 0.0
    inside: float = 0.0  # the same, of what it sends to members of its region, and to others
    outside: float = 0.0
    measured: int = 0  # reduces after which it told the above
    exchanged: bool = False  # an exchange was committed with it, in this life or an earlier one
    rtts: dict[NodeId, float] = {}  # seconds, to other members
    pin: Pin = NO_PIN  # of the certificate that its data plane shows
    key: PublicKey = NO_KEY  # the node's, for its life
    invite: int = 0  # number of the invite that its node came with last; 0: not known
    owner: str = ""  # whom that invite is for; empty: not known
    version: str = ""  # of its software, as it says; empty: not known

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes a second that its link carries up and down, as plans go by them: what others saw of it, or less if
        it says so, once it has said anything; 0: not known."""
        if not self.measured and not self.up:
            return self.seen_up, self.seen_down
        return min(self.up, self.seen_up), min(self.down, self.seen_down)

    def trusted_as(self, *states: MemberState) -> bool:
        """Whether the member is in one of the states and not suspected."""
        return self.suspected is None and self.state in states

    @property
    def rests(self) -> bool:
        """Whether no round waits for its steps."""
        return self.idle or self.paused

    @property
    def measures(self) -> bool:
        """Whether its trainer can measure a validation loss now."""
        return self.evaluates and not self.paused

    @property
    def shown_state(self) -> str:
        """The state as people are shown it: "suspect" for whoever is suspected."""
        return self.state if self.suspected is None else "suspect"

    @property
    def shown_reason(self) -> str:
        """The reason of the state that people are shown."""
        if self.suspected is not None:
            return self.suspected
        waits = self.idle and not self.paused and self.state is MemberState.ACTIVE
        return self.reason or ("its trainer takes no steps: no round waits for it" if waits else "")


class Members(Struct, frozen=True, gc=False):
    """The members that are here and those that are gone, with counts that spare callers a look at all of them.

    Invariant: `here` and `departed` have no node in common; `suspects`, `idle`, `saving`, `holding` and
    `trusted_counts` are what a look at `here` would give.
    """

    here: dict[NodeId, Member] = {}
    departed: dict[NodeId, Member] = {}  # the latest last
    next_id: int = 1
    suspects: frozenset[NodeId] = frozenset()  # of those that are here
    idle: frozenset[NodeId] = frozenset()  # of those that are here, who rest
    saving: frozenset[NodeId] = frozenset()  # of those that are here, who save bytes
    holding: dict[int, int] = {}  # round: how many hold its state
    trusted_counts: dict[MemberState, int] = {}  # how many in a state are not suspected
    changes: int = 0  # grows when somebody comes or goes, and when what one is changes
    reports: int = 0  # grows when one tells which state it holds
    losses: int = 0  # grows when an active member goes, begins anew or is suspected
    generations: int = 0  # grows when who is active changes

    def of(self, *states: MemberState) -> tuple[NodeId, ...]:
        """The members in these states that are not suspected."""
        return tuple(n for n, m in self.here.items() if m.trusted_as(*states))

    @property
    def generation(self) -> tuple[NodeId, ...]:
        """The members that an epoch is named for."""
        return tuple(n for n, m in self.here.items() if m.state is MemberState.ACTIVE)

    def count(self, *states: MemberState) -> int:
        """The number of members in these states that are not suspected."""
        return sum(self.trusted_counts.get(state, 0) for state in states)

    def trusted(self, node: NodeId) -> bool:
        return node in self.here and self.here[node].suspected is None


def join(
    members: Members,
    node: NodeId,
    life: int,
    name: str,
    address: str,
    session: str,
    now: float,
    leaf: bool = False,
    role: str = "",
    pin: Pin = NO_PIN,
    key: PublicKey = NO_KEY,
    invite: int = 0,
    owner: str = "",
    version: str = "",
) -> Members:
    """Admit a new node, or one that returns under its old id; its stream of views is not open yet."""
    before = members.here.get(node)
    known = members.here.get(node) or members.departed.get(node)
    member = Member(
        node,
        life,
        name,
        address,
        session,
        MemberState.REDUCER if role == REDUCER else MemberState.JOINING,
        now,
        now,
        connected=False,
        suspect_at=now + RECONNECT_GRACE_SECONDS,
        expire_at=now + 2 * RECONNECT_GRACE_SECONDS,
        reason="" if role == REDUCER else "starting its trainer",
        leaf=leaf,
        role=role,
        up=known.up if known is not None else 0.0,
        down=known.down if known is not None else 0.0,
        seen_up=known.seen_up if known is not None else 0.0,
        seen_down=known.seen_down if known is not None else 0.0,
        step_before=known.step if known is not None else (0, 0),
        idle=known is not None and known.rests,
        usual_pace=known.usual_pace if known is not None else 0.0,
        fastest=known.fastest if known is not None else 0.0,
        counted_at=known.counted_at if known is not None else now,
        turns=known.turns if known is not None else 0,
        exchanged=known is not None and known.exchanged,
        inside=known.inside if known is not None else 0.0,
        outside=known.outside if known is not None else 0.0,
        pin=pin,
        key=key or (known.key if known is not None else NO_KEY),
        invite=invite or (known.invite if known is not None else 0),
        owner=owner or (known.owner if known is not None else ""),
        version=version,
    )
    gone = (
        {n: m for n, m in members.departed.items() if n != node} if node in members.departed else members.departed
    )
    next_id = max(members.next_id, int(node[1:]) + 1)
    return _recounted(
        replace(members, departed=gone, next_id=next_id), members.here | {node: member}, [(before, member)]
    )


def put(members: Members, *changed: Member) -> Members:
    """Replace members that are here by what they are now. KeyError for one that is not here."""
    if not changed:
        return members
    here, counted, reports = dict(members.here), list[tuple[Member | None, Member | None]](), 0
    for member in changed:
        before, here[member.node] = here[member.node], member
        reports += before.state_round != member.state_round
        if _kind(before) != _kind(member):
            counted.append((before, member))
    if not counted:
        return replace(members, here=here)
    return _recounted(replace(members, reports=members.reports + reports), here, counted)


def _kind(member: Member) -> tuple[object, ...]:
    """What the counts in `Members` are made of; all but the last is what it is."""
    return member.state, member.suspected is None, member.rests, member.saves_bytes, member.state_round


def report_state(members: Members, node: NodeId, round_: int, digest: bytes) -> Members:
    """Enter which state a member says it holds. It counts as a report even where it says the same again."""
    member = replace(members.here[node], state_round=round_, state_digest=digest)
    return replace(put(members, member), reports=members.reports + 1)


def _recounted(
    members: Members, here: dict[NodeId, Member], changed: Iterable[tuple[Member | None, Member | None]]
) -> Members:
    """With `here` in the place of who was; `changed`: whom it has in the place of whom, None: nobody."""
    active = MemberState.ACTIVE
    suspects, holding, trusted = members.suspects, dict(members.holding), dict(members.trusted_counts)
    idle, saving = members.idle, members.saving
    changes, losses, generations = members.changes, members.losses, members.generations
    for was, now in changed:
        same = was is not None and now is not None and was.life == now.life
        changes += not same
        for member, by in ((was, -1), (now, 1)):
            if member is not None:
                holding[member.state_round] = holding.get(member.state_round, 0) + by
                trusted[member.state] = trusted.get(member.state, 0) + by * (member.suspected is None)
        if was is not None and now is not None:
            changes += same and _kind(was)[:-1] != _kind(now)[:-1]
        generations += (was is not None and was.state is active) != (now is not None and now.state is active)
        if was is not None:
            losses += was.trusted_as(active) and (not same or now is None or not now.trusted_as(active))
            suspects = suspects if was.suspected is None else suspects - {was.node}
            idle = idle - {was.node} if was.rests else idle
            saving = saving - {was.node} if was.saves_bytes else saving
        if now is not None and now.suspected is not None:
            suspects = suspects | {now.node}
        if now is not None and now.rests:
            idle = idle | {now.node}
        if now is not None and now.saves_bytes:
            saving = saving | {now.node}
    return replace(
        members,
        here=here,
        suspects=suspects,
        idle=idle,
        saving=saving,
        holding={round_: n for round_, n in holding.items() if n},
        trusted_counts={state: n for state, n in trusted.items() if n},
        changes=changes,
        losses=losses,
        generations=generations,
    )


def remove(members: Members, node: NodeId, state: MemberState, reason: str) -> Members:
    """Take a member out; it may come back under its id until MAX_DEPARTED others went after it."""
    member = replace(members.here[node], state=state, reason=reason, suspected=None, connected=False)
    here = dict(members.here)
    before = here.pop(node)
    return _recounted(replace(members, departed=members.departed | {node: member}), here, [(before, None)])


def oldest_departed(members: Members) -> tuple[NodeId, ...]:
    """The members that went longest ago, as many as are remembered beyond MAX_DEPARTED."""
    return tuple(members.departed)[: max(0, len(members.departed) - MAX_DEPARTED)]


def forget(members: Members, nodes: Container[NodeId]) -> Members:
    return replace(members, departed={n: m for n, m in members.departed.items() if n not in nodes})


def suspect(members: Members, node: NodeId, reason: str) -> Members:
    """Make a member a suspect, with this reason; one that is a suspect keeps the reason that it has."""
    member = members.here[node]
    if member.suspected is not None:
        return members
    return put(members, replace(member, suspected=reason))


def trust(members: Members, node: NodeId) -> Members:
    member = members.here[node]
    if member.suspected is None:
        return members
    return put(members, replace(member, suspected=None))


def enter_step(members: Members, node: NodeId) -> Members:
    """Enter that the member's trainer has taken an inner step."""
    member = members.here[node]
    return (
        members if member.stepped and not member.idle else put(members, replace(member, stepped=True, idle=False))
    )


def set_idle(members: Members, nodes: Iterable[NodeId]) -> Members:
    """Enter of each of `nodes` that it was waited for in vain."""
    return put(members, *(replace(members.here[n], idle=True) for n in nodes))


def pause(members: Members, node: NodeId, saves_bytes: bool, now: float) -> Members:
    """Enter that the member takes no steps, as it says, and whether it exchanges anything with peers."""
    member = members.here[node]
    at = member.paused_at if member.paused and not saves_bytes else now
    rest = replace(member, paused=True, says_paused=True, paused_at=at)
    return put(members, replace(rest, saves_bytes=saves_bytes, says_saves_bytes=saves_bytes))


def resume(members: Members, node: NodeId) -> Members:
    """Enter that the member may take steps again: it is waited for once it has taken one. One without a trainer
    takes none, and is not waited for in any case."""
    member = members.here[node]
    rest = replace(member, paused=False, says_paused=False, saves_bytes=False, says_saves_bytes=False)
    if member.role != REDUCER:
        rest = replace(rest, idle=True, stepped=False, step_before=member.step)
    return put(members, rest)


def disconnect(members: Members, node: NodeId, limits: MembersConfig, now: float) -> Members:
    """Enter that a member's stream of views broke: it is a suspect until it opens another."""
    expire_at = now + limits.reconnect
    members = put(members, replace(members.here[node], connected=False, suspect_at=now, expire_at=expire_at))
    members = suspect(members, node, "its connection broke")
    if len(members.here) > 1 and not any(m.connected for m in members.here.values()):
        until = (
            now + RECONNECT_GRACE_SECONDS + limits.reconnect
        )  # it is rather the coordinator's own link that broke
        return put(members, *(replace(m, expire_at=max(m.expire_at, until)) for m in members.here.values()))
    return members


def disconnect_all(members: Members, limits: MembersConfig, now: float) -> Members:
    """Enter that the coordinator was started again: nobody is connected, and everybody has time to come back."""
    expire_at = now + max(limits.lease, RECONNECT_GRACE_SECONDS + limits.reconnect)
    away = (
        replace(
            member,
            connected=False,
            suspect_at=now + RECONNECT_GRACE_SECONDS,
            expire_at=expire_at,
            heard_at=now,
            moved_at=now,
            stuck=0.0,
        )
        for member in members.here.values()
    )
    return put(members, *away)


def start_stall_clocks(members: Members, nodes: Iterable[NodeId], now: float) -> Members:
    """Begin to wait for these members' trainers: their clocks go on where they stood."""
    waited_for = map(members.here.__getitem__, nodes)
    return put(members, *(replace(m, moved_at=now - m.stuck) for m in waited_for))


def stop_stall_clocks(members: Members, nodes: Iterable[NodeId], mover: NodeId | None, now: float) -> Members:
    """Stop waiting for the trainers of those of `nodes` that are here; `mover`: who did what it was waited for."""
    stopped = (m for n in nodes if (m := members.here.get(n)) is not None)
    return put(
        members, *(replace(m, stuck=0.0 if m.node == mover else max(now - m.moved_at, 0.0)) for m in stopped)
    )


def record_heartbeats(members: Members, beats: Iterable[Heartbeat], now: float) -> Members:
    """Enter heartbeats; those of nodes that are gone, or of their earlier lives, change nothing."""
    here = dict(members.here)
    for beat in beats:
        if (m := here.get(beat.node)) is not None and m.life == beat.life:
            step = beat.round, beat.inner_step
            moved_at = now if step != m.step or beat.phase != m.phase else m.moved_at
            here[beat.node] = replace(
                m,
                heard_at=now,
                phase=beat.phase,
                step=step,
                moved_at=moved_at,
                says_paused=beat.paused or beat.saves_bytes,
                says_saves_bytes=beat.saves_bytes,
            )
    return replace(members, here=here)


def judge(members: Members, limits: MembersConfig, awaited: Container[NodeId], now: float) -> list[Event]:
    """Verdicts of the clock at `now`, in seconds; `awaited`: the members whose trainers the run waits for.

    The shell asks at every tick and submits the answer: the journal holds verdicts, not heartbeats.
    """
    verdicts: list[Event] = []
    for node, m in members.here.items():
        silence = now - m.heard_at
        if not m.stepped and m.step != m.step_before and min(m.step) > 0:
            verdicts.append(Stepped(node, m.life))
        more = m.says_paused > m.paused or m.says_saves_bytes > m.saves_bytes
        if more and now - m.paused_at >= PAUSE_INTERVAL_SECONDS:
            verdicts.append(Paused(node, m.life, m.says_saves_bytes))
        elif m.paused and not m.says_paused:
            verdicts.append(Resumed(node, m.life))
        elif m.saves_bytes and not m.says_saves_bytes:
            verdicts.append(Paused(node, m.life))
        if not m.connected and now > m.expire_at:
            why = "it is not connected" if m.suspected is None else m.suspected
            verdicts.append(Expired(node, m.life, f"{why} and it did not come back in time", silence=silence))
        elif silence > limits.lease:
            verdicts.append(Expired(node, m.life, f"silent for more than {limits.lease:g} s", silence=silence))
        elif node in awaited and now - m.moved_at > limits.stall:
            reason = f"its trainer made no progress for more than {limits.stall:g} s"
            verdicts.append(Expired(node, m.life, reason, stalled=True))
        elif m.suspected is None:
            if not m.connected and now > m.suspect_at:
                verdicts.append(Suspected(node, m.life, "it is not connected"))
            elif silence > limits.lease / 2:
                verdicts.append(Suspected(node, m.life, f"it is silent for {silence:.0f} s"))
        elif m.connected and silence <= limits.lease / 2:
            verdicts.append(SuspicionCleared(node, m.life))
    return verdicts
