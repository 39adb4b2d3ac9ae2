"""Whatever members tell of a round, there is a verdict or none, in numbers and words that can be kept; and what a
lone member tells of others is said to be its word."""

from math import isfinite
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind
from atoll.comm.replace import replace
from atoll.coordinator.causes.account import Account, Incident, LinkAccount
from atoll.coordinator.causes.explanation import Confidence, Kind, Verdict
from atoll.coordinator.causes.observations import PHASES, MemberSeen, Observations, Standing
from atoll.coordinator.causes.verdict import verdict

NODES = [NodeId(f"n{k}") for k in (1, 2, 3, 4, 999_999_999_999)]
SECONDS = st.sampled_from([0.0, 1e-9, 0.3, 0.5, 1.0, 2.9, 3.1, 7.0, 60.0, 1e6])
COUNTS = st.sampled_from([0, 1, 5, 1000, 1 << 50])
NODE = st.sampled_from(NODES)
INCIDENTS = st.builds(Incident, st.sampled_from(IncidentKind), SECONDS, st.none() | NODE, SECONDS | st.just(-9.0))
LINKS = st.builds(
    LinkAccount,
    *(NODE, COUNTS, COUNTS, SECONDS, SECONDS | st.just(1e15), COUNTS, COUNTS, SECONDS, SECONDS, SECONDS, SECONDS),
)
ACCOUNTS = st.builds(
    Account,
    *(COUNTS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS | st.just(-1e10)),
    st.lists(INCIDENTS, max_size=4).map(tuple),
    st.lists(LINKS, max_size=4).map(tuple),
    *(COUNTS, COUNTS, SECONDS | st.just(1e15), SECONDS | st.just(1e15)),
)
MEMBERS = st.builds(
    MemberSeen,
    st.sampled_from(["ada", "bo", ""]),
    st.sampled_from(Standing),
    back=st.booleans(),
    reached=st.none() | SECONDS,
    contributed=st.none() | SECONDS,
    sealed=st.none() | SECONDS,
    complete=st.none() | SECONDS,
    counted=st.booleans(),
    pace=SECONDS,
    usual=SECONDS,
    still=SECONDS,
    incidents=st.integers(0, (1 << 32) - 1),
    rests=st.booleans(),
)
PAIRS = st.lists(st.tuples(NODE, NODE), max_size=3).map(tuple)
OBSERVED = st.builds(
    Observations,
    st.just(7),
    st.fixed_dictionaries(dict.fromkeys(PHASES, SECONDS)),
    st.just({}) | st.fixed_dictionaries(dict.fromkeys(PHASES, SECONDS)),
    SECONDS,
    st.integers(1, 3),
    members=st.dictionaries(NODE, MEMBERS, max_size=4),
    broken=PAIRS,
    forged=PAIRS,
    late=st.frozensets(NODE, max_size=2),
    differed=st.frozensets(NODE, max_size=2),
    changed=st.dictionaries(NODE, st.integers(0, 1 << 32), max_size=2),
    restarts=st.integers(0, 2),
    stalled=SECONDS,
    accounts=st.dictionaries(NODE, ACCOUNTS, max_size=4),
)


@pytest.mark.hypothesis
@given(OBSERVED)
def test_whatever_is_told_there_is_a_verdict_that_can_be_kept_or_none(seen: Observations) -> None:
    found = verdict(seen)
    if found is not None:
        assert isfinite(found.seconds) and isfinite(found.slower) and found.seconds >= 0 and found.slower >= 0
        assert found.sentence and len(found.sentence) < 500
        assert seen.usual or not found.slower  # than what?
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Verdict) == found


@pytest.mark.long
@pytest.mark.hypothesis
@given(OBSERVED, st.randoms())
def test_a_verdict_does_not_hang_on_the_order_in_which_members_answered(seen: Observations, random: Any) -> None:
    accounts = list(seen.accounts.items())
    random.shuffle(accounts)
    assert verdict(seen) == verdict(replace(seen, accounts=dict(accounts)))


def test_what_one_member_alone_tells_of_another_is_said_to_be_its_word() -> None:
    """n1 blames n2 for all that one can blame another for; n2 and the others say nothing is wrong."""
    members = {n: MemberSeen(str(n), reached=1.0, contributed=0.1) for n in NODES[:4]}
    honest = {
        n: Account(links=tuple(LinkAccount(p, 10**6, 10**6, 0.1, 1e7) for p in NODES[:4] if p != n)) for n in NODES
    }
    lies = [
        Account(incidents=(Incident(IncidentKind.BYTES_SPOILED, 1.0, NODES[1]),)),
        Account(links=(LinkAccount(NODES[1], 10, 10, 9.0, 1e7, 100, 90, mute=9.0),)),
        Account(links=(LinkAccount(NODES[1], 10**6, 10**6, 9.0, 1e7),)),
        Account(links=(LinkAccount(NODES[1], 10**6, 10**6, 9.0, 1e7, 1000, 200),)),
    ]
    for lie in lies:
        seconds = dict.fromkeys(PHASES, 1.0) | {"reduce": 9.0}
        usual = dict.fromkeys(PHASES, 1.0)
        told = Observations(7, seconds, usual, members=members, accounts={NODES[0]: lie})
        found = verdict(told)
        assert found is not None and found.kind is not Kind.UNKNOWN
        assert found.confidence is Confidence.TOLD, (found, lie)
        assert {found.culprit, found.peer} == {NODES[0], NODES[1]}, "its own name stands beside the other's"
        both = verdict(replace(told, accounts=honest | {NODES[0]: lie}))
        assert both is not None and NODES[0] in (both.culprit, both.peer)
        assert both.kind is not Kind.ONE_WAY_PARTITION or both.confidence is Confidence.TOLD, "n2 says it hears n1"


def test_that_nothing_says_why_is_said_of_a_round_that_took_a_quarter_longer_and_not_of_less() -> None:
    usual = {"inner": 6.5, "collect": 0.1, "reduce": 0.8, "commit": 0.2}
    members = {n: MemberSeen(str(n), reached=6.0, contributed=0.1) for n in NODES[:3]}
    seen = Observations(7, usual | {"reduce": 1.6}, usual, predicted=1.6, members=members)
    assert verdict(seen) is None
    found = verdict(replace(seen, seconds=usual | {"reduce": 3.0}, predicted=3.0))
    assert found is not None and found.kind is Kind.UNKNOWN
