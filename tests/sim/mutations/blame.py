"""Inquiries into rounds that were slow or in which something failed, and the verdicts on them."""

from sim.mutations.mutation import SCENARIOS, C, Mutation

INQUIRY, VERDICTS = (
    "tests/coordinator/state_machine/test_inquiry.py",
    "tests/coordinator/causes/test_transcripts.py",
)
RULES, ACCOUNTS = "tests/coordinator/causes/test_verdict.py", "tests/node/control/test_round_account.py"
M, CAUSES = C + "state_machine/", C + "causes/"

MUTATIONS = [
    Mutation(
        "every round is looked into",
        M + "inquiry.py",
        "if not (is_slow(pace, record.predicted, state.paces) or _failed(state, record)):",
        "if False:",
        SCENARIOS,
    ),
    Mutation(
        "a record waits for no account",
        M + "state_sync.py",
        " and not inquiry.is_open(state)",
        "",
        SCENARIOS,
    ),
    Mutation(
        "who does not account for a round is waited for for ever",
        M + "inquiry.py",
        "if now < asked.until and (",
        "if (",
        SCENARIOS,
    ),
    Mutation(
        "who is gone is waited for",
        M + "inquiry.py",
        "if n not in asked.accounts and state.members.trusted(n))",
        "if n not in asked.accounts)",
        SCENARIOS,
    ),
    Mutation(
        "who was not asked accounts for a round",
        M + "inquiry.py",
        " or event.node not in asked.asked:",
        ":",
        INQUIRY,
    ),
    Mutation(
        "an account of another round is taken for one of this",
        M + "inquiry.py",
        "event.round != asked.seen.round or event.node not in",
        "event.node not in",
        INQUIRY,
    ),
    Mutation(
        "everybody is asked, however many they are",
        M + "inquiry.py",
        "if len(able) > MAX_ASKED:",
        "if False:",
        INQUIRY,
    ),
    Mutation(
        "of many, it is chance who is asked",
        M + "inquiry.py",
        "able = sorted(last, key=lambda n: n not in odd)[:MAX_ASKED]",
        "able = last[:MAX_ASKED]",
        INQUIRY,
    ),
    Mutation(
        "what lasts is noted again and again",
        M + "inquiry.py",
        "if found is None or lasts or",
        "if found is None or",
        SCENARIOS,
    ),
    Mutation(
        "what is over is never news again",
        M + "inquiry.py",
        'return replace(state, blamed=("", "", "")) if any(state.blamed) else state, None',
        "return state, None",
        SCENARIOS,
    ),
    Mutation(
        "a state that differs is found too late for the verdict",
        M + "state_sync.py",
        "            state = inquiry.with_digests(replace(state, pending=record))\n",
        "            state = replace(state, pending=record)\n",
        SCENARIOS,
    ),
    Mutation(
        "who comes back after a break is dead",
        M + "inquiry.py",
        "return replace(seen, back=True) if seen.life != member.life else replace(seen, standing=Standing.AWAY)",
        "return seen",
        "tests/coordinator/state_machine",
    ),
    Mutation(
        "who was waited for in vain is not looked at",
        M + "rounds.py",
        "idled=r.idled.union(unstepped))",
        "idled=r.idled)",
        SCENARIOS,
    ),
    Mutation(
        "a full disk outweighs who was slow",
        CAUSES + "explanation.py",
        "return Weight.SLOWNESS if much else Weight.CONDITION - 0.5",
        "return Weight.CONDITION - 0.5",
        VERDICTS,
    ),
    Mutation(
        "a lone member's word on another is called agreed",
        CAUSES + "paths.py",
        "Confidence.AGREED if _both_ends(seen, of) else Confidence.TOLD",
        "Confidence.AGREED",
        RULES,
    ),
    Mutation(
        "a path that is cut one way is cut both ways",
        CAUSES + "paths.py",
        "if len(ways) != 1:",
        "if True:",
        VERDICTS,
    ),
    Mutation(
        "a queue that is full is a link that loses",
        CAUSES + "paths.py",
        "link.lost >= LOSSY_SHARE and not full",
        "link.lost >= LOSSY_SHARE",
        VERDICTS,
    ),
    Mutation(
        "a slow store is the fault of each who waits for it",
        CAUSES + "trainers.py",
        "if len(starving := _starving(seen)) > 1 and",
        "if len(starving := _starving(seen)) > 99 and",
        VERDICTS,
    ),
]
