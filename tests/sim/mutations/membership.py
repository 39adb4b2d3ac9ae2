"""What is believed of members and of the state that they hold."""

from sim.mutations.mutation import NODE, SCENARIOS, C, Mutation, N

MUTATIONS = [
    # States and digests
    Mutation(
        "the first to tell names the digest",
        C + "state_machine/state_sync.py",
        "if state.tied or not votes or (2 * votes <= len(voters) and len(told) < len(voters)):",
        "if state.tied or not votes:",
        SCENARIOS,
    ),
    Mutation(
        "of as many votes the first one's count",
        C + "state_machine/state_sync.py",
        "if list(Counter(told.values()).values()).count(votes) > 1:",
        "if False:",
        SCENARIOS,
    ),
    Mutation(
        "a member names a tied state by itself",
        C + "state_machine/rollback.py",
        "if node not in told or len(alike) < 2 or 2 * len(alike) <= len(told):",
        "if node not in told:",
        SCENARIOS,
    ),
    Mutation(
        "one member's state 0 is the run's though another makes one",
        C + "state_machine/beginning.py",
        'return digest if votes > 1 else b""',
        "return digest",
        SCENARIOS,
    ),
    Mutation(
        "an initialiser has all the time that it wants",
        C + "state_machine/beginning.py",
        "pending = [n for n, at in asked.items() if now - at <= limit and here[n].suspected is None]",
        "pending = [n for n in asked if here[n].suspected is None]",
        SCENARIOS,
    ),
    Mutation(
        "the first to tell a model decides alone",
        C + "state_machine/beginning.py",
        "settled = list(told.values()).count(layout) > 1",
        "settled = True",
        SCENARIOS,
    ),
    Mutation(
        "digests are not compared",
        C + "state_machine/state_sync.py",
        "    if member.state_digest != state.digest:",
        "    if False:",
        17,
    ),
    Mutation(
        "an older word on a member's state counts",
        C + "state_machine/state_sync.py",
        "if not state.members.here[node].state_round <= round_ <= state.committed:",
        "if not round_ <= state.committed:",
        2,
    ),
    # Lives, incarnations, epochs
    Mutation(
        "earlier lives are heard",
        C + "state_machine/step.py",
        "return event.node not in state.members.here or member is None or event.life != member.life",
        "return event.node not in state.members.here or member is None",
        SCENARIOS,
    ),
    Mutation(
        "the incarnation is not taken over",
        C + "state_machine/step.py",
        "state = replace(state, incarnation=incarnation, members=members)",
        "state = replace(state, members=members)",
    ),
    Mutation(
        "epochs do not change",
        C + "state_machine/step.py",
        "return replace(state, epoch=state.epoch + 1)",
        "return state",
    ),
    Mutation(
        "the fence counts members for the epoch",
        C + "state_machine/reduce.py",
        "Epoch(state.epoch)",
        "Epoch(len(ledger.members))",
    ),
    Mutation(
        "a hung trainer is waited for",
        C + "state_machine/members.py",
        "elif node in awaited and now - m.moved_at > limits.stall:",
        "elif node in awaited and now - m.moved_at > 1e9:",
        4,
    ),
    Mutation(
        "the silent stay",
        C + "state_machine/members.py",
        "elif silence > limits.lease:",
        "elif silence > 1e9:",
        2,
    ),
    # A state that is gone
    Mutation(
        "an older state is gone on from at once",
        C + "state_machine/rollback.py",
        "return _void(state, past, now, out) if too_late or (settled and (late or all_back)) else state",
        "return _void(state, past, now, out)",
        10,
    ),
    Mutation(
        "the run waits for a lost state for ever",
        C + "state_machine/rollback.py",
        "return _void(state, past, now, out) if too_late or (settled and (late or all_back)) else state",
        "return state",
        SCENARIOS,
    ),
    Mutation(
        "who is heard again gets no time to say what it can make of what it holds",
        C + "state_machine/rollback.py",
        "    settled = now >= since.returned_at + SETTLE_SECONDS",
        "    settled = True",
        SCENARIOS,
    ),
    Mutation(
        "tokens of a void round count",
        C + "state_machine/rollback.py",
        "tokens=past.tokens,\n        pending",
        "pending",
        SCENARIOS,
    ),
    Mutation(
        "a node does not know its state by another number",
        N + "state_machine/step.py",
        "    if isinstance(before, At) and before.round < view.committed and before.digest == view.state_digest:",
        "    if False:",
        NODE,
    ),
]
