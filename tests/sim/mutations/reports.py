"""What a node reports: what of it is sent, and how it is encoded and decoded."""

from sim.mutations.mutation import OUTBOX, C, Mutation, N

MUTATIONS = [
    Mutation(
        "a new session says what the one before had to say",
        N + "control/outbox.py",
        "        self._waiting.clear()\n",
        "",
        2,
    ),
    Mutation(
        "what was in flight when a session was lost is waited for in the next",
        N + "control/outbox.py",
        "        self.in_flight, self._more = None, False",
        "        self._more = False",
        2,
        slow=True,
    ),
    Mutation(
        "reports carry the session before",
        N + "control/outbox.py",
        "        self._session = session",
        "        self._session = self._session or session",
    ),
    Mutation(
        "seals of different attempts travel under one fence",
        N + "control/outbox.py",
        " and report.fence == last.fence:",
        ":",
        OUTBOX,
    ),
    Mutation(
        "a report overtakes those before it",
        N + "control/outbox.py",
        "self._waiting.popleft()[1]",
        "self._waiting.pop()[1]",
        OUTBOX,
    ),
    Mutation(
        "every loss of a peer waits to be reported",
        N + "control/outbox.py",
        "    return both and same and report.fence == other.fence",
        "    return False",
        OUTBOX,
    ),
    Mutation(
        "the loss of a peer in another attempt is not reported",
        N + "control/outbox.py",
        "    return both and same and report.fence == other.fence",
        "    return both and same",
        OUTBOX,
    ),
    Mutation(
        "a stream of views that is behind is never given up",
        N + "control/freshness.py",
        "return self._behind_since is not None and now",
        "return False and now",
        4,
    ),
    Mutation(
        "a seal is reported under the newest attempt",
        N + "control/reports.py",
        "fence=_fence(plan, seal.since)",
        "fence=_fence(plan)",
    ),
    Mutation(
        "of seals that travel together one counts",
        C + "service/validation.py",
        "s.inputs[:MAX_MEMBER_BITMAP]) for s in m.seals)",
        "s.inputs[:MAX_MEMBER_BITMAP]) for s in m.seals[:1])",
    ),
    Mutation(
        "who began from the anchor is not believed to have",
        C + "service/validation.py",
        "            m.fresh,\n",
        "",
        1,
    ),
]
