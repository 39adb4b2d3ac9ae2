"""The node's machine, alone, with overlap and with fragments."""

from sim.mutations.mutation import NODE, C, Mutation, N

MUTATIONS = [
    # The node
    Mutation(
        "a node takes in older views",
        N + "state_machine/step.py",
        "if state.view is not None and _order(view) <= _order(state.view):",
        "if False:",
        NODE,
    ),
    Mutation(
        "carried work is kept whatever the lease",
        N + "state_machine/step.py",
        "base = state.carried if state.carried is not None and state.carried.front == front else None",
        "base = state.carried",
        16,
    ),
    Mutation(
        "work is not carried over",
        N + "state_machine/step.py",
        "state = replace(state, work=CarriedWork(state.work.work))",
        "state = replace(state, work=None)",
    ),
    Mutation(
        "a lost Ready is not said again",
        N + "state_machine/step.py",
        "    if counted and state.ready is not None and not view.ready and _is_for(state.ready, view.train):",
        "    if False:",
        5,
    ),
    Mutation(
        "a node that rejoins does not say what it holds",
        N + "state_machine/step.py",
        "    if isinstance(state.outer, At):\n        out.append(ReportState",
        "    if False:\n        out.append(ReportState",
        NODE,
    ),
    Mutation(
        "a wrong state is kept",
        N + "state_machine/step.py",
        "state.outer.round != view.committed or _differs(state.outer, view):",
        "state.outer.round != view.committed:",
        8,
    ),
    Mutation(
        "a node says the run's digest for its own",
        N + "state_machine/step.py",
        "out.append(ReportState(round_, digest))",
        "out.append(ReportState(round_, (state.view and state.view.state_digest) or digest))",
        17,
    ),
    Mutation(
        "a trainer that died while it wrote keeps what it carried",
        N + "state_machine/step.py",
        "work=state.work if isinstance(state.work, ReadyWork) else None, turns=turns)",
        "turns=turns)",
        4,
    ),
    # Overlap
    Mutation(
        "the state moves under a trainer that is to take it",
        N + "state_machine/step.py",
        "if isinstance(state.trainer, Training):  # first",
        "if False:  # first",
        2,
    ),
    Mutation(
        "a trainer that is ahead goes on, whatever was committed",
        N + "state_machine/step.py",
        "on = isinstance(task, Ahead) and bool(rest) and rest[0][0] == task.front",
        "on = isinstance(task, Ahead)",
        2,
    ),
    # Fragments
    Mutation(
        "the coordinator plans another fragment than the round's",
        C + "state_machine/state.py",
        "return self.turns.fragment(self.round.number)",
        "return self.turns.fragment(self.committed)",
        1,
    ),
    Mutation(
        "a turn of all fragments has the inner steps of one round",
        C + "service/view.py",
        "        steps=state.steps,",
        "        steps=state.config.rounds.inner_steps,",
        1,
    ),
    Mutation(
        "a delta is weighed without what was committed with other fragments",
        C + "state_machine/weights.py",
        "_samples(e.contribution) if e.contribution else 0 for",
        "e.contribution.samples if e.contribution else 0 for",
        1,
    ),
    Mutation(
        "steps are behind a fragment's next delta, too",
        C + "state_machine/reduce.py",
        "0 if p == state.fragment else before[p]",
        "before[p]",
        1,
    ),
    Mutation(
        "who began from the anchor is weighed as if it had not",
        C + "state_machine/rounds.py",
        "    if work.fresh:",
        "    if False:",
        1,
    ),
    Mutation(
        "what came when all chunks were sealed is trained anew, on top of itself",
        N + "state_machine/step.py",
        " and not _in(front, turns.applied)",
        "",
        NODE,
    ),
    Mutation(
        "what a trainer left when it died is gone on from",
        N + "state_machine/step.py",
        "replace(state.turns, from_local=False)\n        state = replace(state, work=state",
        "state.turns\n        state = replace(state, work=state",
        1,
    ),
    # Bad arithmetic
    Mutation(
        "what was carried stays under steps that are of no use",
        N + "state_machine/step.py",
        "            state = replace(state, work=None, doubted_round=0, turns=turns)\n        case Ahead(",
        "            state = replace(state, turns=turns)\n        case Ahead(",
        NODE,
    ),
    Mutation(
        "a node that always miscalculates stays",
        N + "state_machine/step.py",
        "if count >= MAX_BAD_ORDERS:",
        "if False:",
        "tests/sim/test_scenarios.py",
    ),
    Mutation(
        "a trainer that miscalculates is taken to be at work",
        N + "state_machine/step.py",
        "    return replace(state, trainer=Evaluating(round_) if evaluating else Idle())\n\n\ndef _evaluated",
        "    return state\n\n\ndef _evaluated",
        "tests/sim/test_scenarios.py",
    ),
    Mutation(
        "a node stays marked when its work is sound again",
        N + "state_machine/step.py",
        '    state = replace(state, trouble="", bad_orders=0)\n',
        "",
        "tests/sim/test_scenarios.py",
    ),
    Mutation(
        "samples of steps that were left out count",
        C + "state_machine/events.py",
        "return self.samples - self.skipped",
        "return self.samples",
        "tests/coordinator/state_machine/test_weights.py",
    ),
]
