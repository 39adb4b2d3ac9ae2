"""A view's bytes, put together from parts that are encoded once, are the plain encoding of the same state.

`plain_view` sets the fields of one message from the state, without parts, caches or bytes put end to end. The
machine is driven by commands of `scenario.Run` that hypothesis draws.
"""

from math import inf

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario import CONFIG, Run

from atoll.comm.bitmap import bitmap
from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import CheckpointConfig, RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY, Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import unpack_plan
from atoll.comm.replace import replace
from atoll.comm.roster import RosterMember, roster_digest
from atoll.coordinator.service.view import MAX_DONORS, MAX_UPLOADERS, common_view, encode, node_view
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.members import REDUCER, Member, MemberState
from atoll.coordinator.state_machine.state import Phase, State
from atoll.coordinator.state_machine.weights import round_length, scales, weights

NAMES = ["ada", "bo", "cy", "dan", "eve", "fay"]
MEASURED = ["seal ada bo cy", "held ada bo cy"]  # they tell the rates of their links
AGAIN = ["wait 10", "reached ada bo cy", "ready ada bo cy"]
CONTRIBUTE = ["wait 10", "reached ada bo cy dan", "ready ada bo cy dan"]


def number(node: NodeId) -> int:
    return int(node.removeprefix("n"))


def lacks(state: State, member: Member) -> bool:
    return member.role != REDUCER and member.state_round != state.committed


def stranded(state: State, member: Member) -> bool:
    """It lacks the state, and cannot make it by applying the latest round."""
    one_behind = member.state_round == state.committed - 1 and member.node in state.makers
    return lacks(state, member) and (member.state is MemberState.RECOVERING or not one_behind)


def plain_donor(member: Member) -> pb.Donor:
    return pb.Donor(node_id=member.node, address=member.address, pin=member.pin, name=member.name)


def dialled_by_leaves(state: State) -> list[Member]:
    """The members that leaves dial, to offer them the state that only leaves have."""
    trainers = [m for m in state.members.here.values() if m.role != REDUCER]
    behind = [m for m in trainers if stranded(state, m)]
    ahead = [m for m in trainers if not stranded(state, m)]
    if state.committed == 0:  # who can make the first state makes it
        behind = [m for m in behind if m.state_digest] if state.state_held else []
    if not behind or not ahead or any(not m.leaf for m in ahead):
        return []
    dialable = [m for m in state.members.here.values() if not m.leaf and m.suspected is None]
    return sorted(dialable, key=lambda m: number(m.node))[:MAX_DONORS]


def ring(members: list[Member], node: NodeId) -> list[Member]:
    """At most `MAX_DONORS` of the members, from another place on for each node, and without the node itself."""
    order = [members[(number(node) + i) % len(members)] for i in range(min(len(members), MAX_DONORS + 1))]
    return [m for m in order if m.node != node][:MAX_DONORS]


def plain_donors(state: State, node: NodeId) -> list[pb.Donor]:
    """Who gives the state to a node that lacks it."""
    here = state.members.here.values()
    donors = [m for m in here if m.state_round == state.committed and m.suspected is None and not m.leaf]
    while len(donors) & (len(donors) - 1):
        donors.pop()  # down to a power of two
    targets = dialled_by_leaves(state)
    if donors:
        return [plain_donor(m) for m in ring(donors, node)]
    if node in [m.node for m in targets]:
        return [pb.Donor(node_id=node, name="peers that dial this node")]
    return [plain_donor(m) for m in ring(targets, node)] if targets else []


def elders(state: State) -> list[NodeId]:
    """The members with a state, in the order in which they joined, leaves last."""
    trainers = [m for m in state.members.here.values() if m.role != REDUCER]
    return [m.node for m in sorted(trainers, key=lambda m: (m.leaf, number(m.node)))]


def plain_plan(state: State) -> pb.Plan:
    r, ledger = state.round, state.round.ledger
    assert r.plan is not None
    fence, chunks = r.plan.fence, len(ledger.owners)
    plan = pb.Plan(
        round=fence.round,
        attempt=fence.attempt,
        incarnation=fence.incarnation,
        epoch=fence.epoch,
        numel=state.chunks.numel,
        length=round_length(ledger, state.config),
        patience=r.plan.patience,
        since=ledger.since,
        kept=bitmap(ledger.sealed_before, chunks),
        regions=ledger.regions,
    )
    factors = list(zip(weights(ledger, state.config), scales(ledger, state.config), strict=True))
    for i, entry in enumerate(ledger.entries):
        m = pb.PlanMember(node_id=entry.node, weight=factors[i][0], scale=factors[i][1], norm=inf, gone=entry.gone)
        if state.config.outer.clip and entry.contribution is not None:
            m.norm = entry.contribution.norm
        if not entry.gone and entry.node in state.members.here:
            member = state.members.here[entry.node]
            m.address, m.pin, m.leaf, m.down = member.address, member.pin, member.leaf, member.rates[1]
        plan.members.append(m)
    for owner in ledger.owners:
        places = [i for i, entry in enumerate(ledger.entries) if entry.node == owner and not entry.gone]
        plan.owners.append(places[-1] if owner is not None else NOBODY)
    if ledger.layered:
        plan.layered = bitmap(ledger.layered, chunks)
        plan.relays.extend(place for row in ledger.relays for place in row)
    return plan


def plain_train(state: State, node: NodeId) -> pb.Train | None:
    """The order to train; None where the node has nothing to train on."""
    r, member = state.round, state.members.here[node]
    trains = r.phase in (Phase.INNER, Phase.COLLECTING, Phase.REDUCING)
    lease = state.leases.by_node.get(node, ())
    if not trains or not lease or member.state not in (MemberState.SYNCED, MemberState.ACTIVE):
        return None
    return pb.Train(
        round=r.number,
        steps=state.steps,
        floor=min(state.config.rounds.floor, state.steps),
        ceiling=state.most_steps,
        tokens=state.tokens,
        fleet=len(r.participants) or 1,
        lease=[pb.Range(first=first, count=count) for first, count in lease],
    )


def plain_view(state: State, node: NodeId, version: int, draining: bool, plan: pb.Plan | None) -> pb.View:
    """The whole view of one node; `plan` is that of the attempt in force, as it was when it opened."""
    r, here = state.round, state.members.here
    view = pb.View(
        version=version, incarnation=state.incarnation, epoch=state.epoch, phase=r.phase, reason=r.reason
    )
    view.has_state = any(m.state_round == state.committed for m in here.values())
    makers = [here[n] for n in state.makers if n in here]
    view.lost = state.committed > 0 and not view.has_state and r.phase is not Phase.FINISHED
    view.lost = view.lost and all(m.state is not MemberState.ACTIVE for m in makers)
    view.tied = state.tied
    view.committed, view.tokens = state.committed, state.tokens
    view.state_digest, view.sealed = state.digest, state.sealed
    view.finished, view.draining = r.phase is Phase.FINISHED and state.pending is None, draining
    if (account := state.credit.nodes.get(conduct.identity(state, node))) is not None:
        view.credited_tokens, view.credited_rounds = account.tokens, account.rounds
    if node not in here:
        departed = state.members.departed.get(node)
        view.you = departed.state if departed is not None else ""
        return view
    me = here[node]
    view.you, view.evaluate = me.state, r.evaluator == node
    holders = [m for m in here.values() if m.state_round == state.committed]
    only_leaves_hold = bool(holders) and all(m.leaf for m in holders)
    remakes = state.committed == 0 and lacks(state, me) and only_leaves_hold and not me.state_digest
    view.initialise = node in state.beginning.asked or remakes
    asked, made = list(state.beginning.asked), state.beginning.made
    view.penalty = conduct.penalty(state, node)
    view.witness = node in asked and (asked[0] != node or any(d for n, d in made.items() if n != node))
    view.ready, view.reached = node in r.ledger.contributions, node in r.reached
    view.closing = node in r.participants and r.phase in (Phase.COLLECTING, Phase.REDUCING)
    if (train := plain_train(state, node)) is not None:
        view.train.CopyFrom(train)
    if plan is not None and any(e.node == node and not e.gone for e in r.ledger.entries):
        view.plan.CopyFrom(plan)
    if lacks(state, me):
        view.donors.extend(plain_donors(state, node))
    if me.leaf and me.role != REDUCER and not stranded(state, me):
        view.serve.extend(plain_donor(m) for m in dialled_by_leaves(state))
    checkpoint = state.config.checkpoint
    first = elders(state)
    view.keeps = me.role != REDUCER and (not checkpoint.copies or node in first[: checkpoint.copies])
    uploaders = first[: min(checkpoint.copies or MAX_UPLOADERS, MAX_UPLOADERS)] if checkpoint.remote else []
    view.upload = uploaders.index(node) + 1 if node in uploaders else 0
    if node in state.last_counted:
        view.counted, view.lacking = state.last_counted[node]
    if node in r.wrong and len(r.ledger.sealed) == len(r.ledger.owners) > 0:
        view.ledger = b"".join(r.ledger.sealed[c].digest for c in range(len(r.ledger.owners)))
    known = {n: RosterMember(m.key, m.address, m.pin, m.leaf) for n, m in here.items()}
    view.roster.digest, view.roster.data_key_number = roster_digest(known, b"", state.expulsions), state.expulsions
    for n, m in here.items():
        view.roster.members.add(node_id=n, key=m.key, address=m.address, pin=m.pin, leaf=m.leaf)
    return view


def report(run: Run, verb: str, name: str) -> None:
    """What a member says of the reduce under way."""
    sealed = ",".join(str(c) for c in run.state.round.ledger.sealed)
    match verb:
        case "wrong":
            run.do("held", [name, "word=other"])
        case "lacking":
            run.do(verb, [name, f"chunks={sealed or 0}"])
        case "orphans":
            run.do(verb, [name, f"here={sealed}"])
        case "held":
            complete = run.event(verb, name, [], {})
            assert isinstance(complete, ev.ReduceComplete)
            run.feed(replace(complete, up=1e6, down=1e6 * len(name)))
        case _:
            run.do(verb, [name])


def apply(run: Run, verb: str, words: list[str]) -> None:
    """One command, for those of the names that can be meant by it now."""
    known = {m.name for m in run.known}
    here = {m.name for m in run.state.members.here.values()}
    names = [w for w in words if w in here]
    match verb:
        case "join" | "leaf" | "reducer":
            for name in words:
                if verb != "join" and name not in known:
                    run.do(verb, [name])
                run.do("back" if name in known else "join", [name])
        case "state":
            run.do("state", [*names, str(run.state.committed)])
        case "stale":
            run.do("state", [*names, str(max(run.state.committed - 1, 0)), "other"])
        case "restart":
            run.do(verb, [])
        case "commit":
            participants = run.steps()
            apply(run, "reduce", participants)
            apply(run, "state", participants)
        case "reduce":
            members = [run.name(node) for node in run.state.round.ledger.members]
            for verb in ("seal", "held"):
                apply(run, verb, members)
        case "wait":
            run.do("wait", ["3"])
        case "regions" if len(names) > 1:
            run.do("regions", [*names[::2], "/", *names[1::2]])
        case "wrong" | "lacking" | "orphans" | "seal" | "held":
            for name in names:
                if run.state.round.plan is not None:  # the one before may have ended the attempt
                    report(run, verb, name)
        case "reached" | "ready" | "leave" | "disconnect" | "connect" | "silent":
            run.do(verb, names)


# how a run begins, and the fields of a view or a plan that it is about
STORIES: dict[str, tuple[list[str], set[str]]] = {
    "nobody has the first state": (["join ada bo"], {"reason", "phase", "initialise"}),
    "a round is open": (["begin ada bo cy"], {"train", "upload", "keeps", "evaluate", "donors"}),
    "a reduce is under way": (["reducing ada bo cy dan"], {"plan", "closing", "ready", "owners", "since"}),
    "a sealed chunk outlives its attempt": (["reducing ada bo cy", "seal ada", "leave cy"], {"kept"}),
    "two levels": (
        ["begin ada bo cy dan", "regions ada bo / cy dan", "commit", "commit", *CONTRIBUTE],
        {"regions", "relays", "layered", "counted"},
    ),
    "links were measured": (["reducing ada bo cy", *MEASURED, "state ada bo cy 1", *AGAIN], {"plan"}),
    "only a leaf has the state": (["leaf ada", "begin ada bo", "commit", "back bo"], {"serve", "donors"}),
    "wrong bytes": (["reducing ada bo cy", "seal ada bo cy", "held ada bo", "held cy word=other"], {"ledger"}),
    "the state is lost": (["begin ada bo", "commit", "back ada", "back bo"], {"lost", "sealed"}),
    "the end": (["set rounds.total 1", "begin ada bo", "commit", "evaluated ada 2 1"], {"finished"}),
}
VERBS = (
    "join join leaf reducer state state stale wait commit commit reduce regions wrong lacking orphans "
    "seal held reached ready ready leave leave disconnect connect silent restart"
).split()
GROUPS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
COMMANDS = st.lists(st.tuples(st.sampled_from(VERBS), GROUPS), min_size=4, max_size=10)
CONFIGS = st.builds(
    lambda copies, remote, clip, feedback: replace(
        CONFIG,
        checkpoint=CheckpointConfig(copies=copies, remote=remote),
        outer=OuterConfig(clip=clip, feedback=feedback, per_token=clip),
    ),
    st.integers(0, 3),
    st.sampled_from(["s3://bucket/run", ""]),
    st.booleans(),
    st.sampled_from([0.0, 0.95]),
)


@pytest.mark.parametrize("story", STORIES)
def test_a_view_decodes_to_the_plain_encoding_of_the_state(story: str) -> None:
    lines, fields = STORIES[story]
    seen: set[str] = set()

    @hypothesis.seed(list(STORIES).index(story))  # else all stories go on with the same commands
    @settings(max_examples=settings().max_examples // 20, phases=[hypothesis.Phase.generate])
    @given(CONFIGS, COMMANDS)
    def check(config: RunConfig, commands: list[tuple[str, list[str]]]) -> None:
        run = Run()
        run.config = config
        run.state = replace(run.state, config=config)
        for line in lines:
            verb, *words = line.split()
            apply(run, verb, words) if line in MEASURED else run.do(verb, words)
        plans: dict[Fence, pb.Plan] = {}  # as they were when their attempts opened
        common = None
        for version, (verb, words) in enumerate([("nothing", []), *commands]):
            apply(run, verb, words)
            state, draining = run.state, version % 3 == 2
            fence = state.round.plan.fence if state.round.plan is not None else None
            plan = plans.setdefault(fence, plain_plan(state)) if fence is not None else None
            common = common_view(state, common, draining)
            for node in (*state.members.here, *state.members.departed, NodeId("n99")):
                view = pb.View.FromString(encode(common, node_view(state, common, node), version))
                unpack_plan(view, common.roster.members)
                assert view == plain_view(state, node, version, draining, plan)
                seen.update(field.name for message in (view, view.plan) for field, _ in message.ListFields())

    check()
    assert seen >= fields, "the story has lost its point"
