"""Replays of contributors' rounds: who is drawn, what is compared, what follows."""

from sim.mutations.mutation import C, Mutation

REPLAY = "tests/coordinator/state_machine/test_replay.py"
VERDICT = "tests/coordinator/state_machine/test_replay_verdict.py"
MACHINE = C + "state_machine/replay.py"

MUTATIONS = [
    Mutation(
        "who says that it left out a sample is not replayed",
        MACHINE,
        "plain = MAX_SKIPPED * work.samples >= work.skipped",
        "plain = not work.skipped",
        REPLAY,
    ),
    Mutation(
        "who says that its work was late is not replayed where that costs it nothing",
        MACHINE,
        "damped = state.config.outer.damping and work.damping < 1.0 - MAX_SKIPPED",
        "damped = work.damping < 1.0 - MAX_SKIPPED",
        REPLAY,
    ),
    Mutation(
        "the commit waits for no verifier",
        C + "state_machine/reduce.py",
        "if replay.awaits_chunks(state, now):",
        "if False:",
        REPLAY,
    ),
    Mutation(
        "a verifier contributes",
        C + "state_machine/rounds.py",
        "if here[n].role != VERIFIER) if",
        "if True) if",
        REPLAY,
    ),
    Mutation("one replay is held against a member", MACHINE, "    if not doubted:", "    if False:", REPLAY),
    Mutation(
        "most members are held to a replay that is odd itself",
        MACHINE,
        "    if _most_look_false(book.latest):",
        "    if False:",
        REPLAY,
    ),
    Mutation("chunks are compared that nobody showed", MACHINE, "    if not task.shown:", "    if False:", REPLAY),
    Mutation(
        "a replay outlives its verifier",
        MACHINE,
        "if member is None or member.life != task.life or member.state_round != task.round - 1:",
        "if member is None:",
        REPLAY,
    ),
    Mutation(
        "one verifier that was shown nothing is enough", MACHINE, "MIN_UNSHOWN = 2", "MIN_UNSHOWN = 1", REPLAY
    ),
    Mutation(
        "who was shown nothing asks again though another verifier could",
        MACHINE,
        "and not _is_for_others(state, node, verifier):",
        "and True:",
        REPLAY,
    ),
    Mutation(
        "for whom no commit waits is never replayed",
        MACHINE,
        "counted = node in state.makers or node in state.unawaited",
        "counted = node in state.makers",
        REPLAY,
    ),
    Mutation("ten replays that were well count for nothing", MACHINE, "RARELY = 0.1", "RARELY = 1.0", REPLAY),
    Mutation(
        "a member that copies another has that one blamed",
        C + "state_machine/replay_verdict.py",
        "*rest, _ = sorted(",
        "*rest, = sorted(",
        VERDICT,
    ),
    Mutation(
        "who is no member may ask what was contributed",
        "comm/allreduce/reduction.py",
        "may_ask = node in self.plan.verifiers or",
        "may_ask = True or",
        "tests/comm/allreduce/test_auditor.py",
    ),
]
