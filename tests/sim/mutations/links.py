"""Links, peers that are late, and merges: what decides around the exchange."""

from sim.mutations.mutation import Mutation, X

LATE, INBOX = "tests/comm/allreduce/test_late_peers.py", "tests/comm/allreduce/test_inbox.py"
CONTROL, LINKS = "tests/comm/allreduce/test_control_frames.py", "tests/comm/transport/test_link_policy.py"

MUTATIONS = [
    Mutation(
        "who sends its contributions one after the other is never late",
        "comm/allreduce/late_peers.py",
        "if 0 < self._patience < held_up:",
        "if False:",
        LATE,
    ),
    Mutation(
        "who was asleep says that others held it up",
        "comm/allreduce/late_peers.py",
        "min(max(now - self._looked_at, 0.0), MAX_LOOK_SECONDS), now",
        "max(now - self._looked_at, 0.0), now",
        LATE,
    ),
    Mutation(
        "a silent peer is never lost",
        "comm/allreduce/late_peers.py",
        "if silence > deadlines.lost_after:",
        "if False:",
        LATE,
    ),
    Mutation(
        "the chunks of a late owner are never asked of others",
        "comm/allreduce/late_peers.py",
        "found += [PullFrom(owners)] if owners else []",
        "pass",
        LATE,
    ),
    Mutation(
        "a contribution that was refused is not asked for again",
        "comm/allreduce/late_peers.py",
        "                    found.append(AskState(node))\n",
        "",
        "tests/sim/test_scenarios.py",
        slow=True,
    ),
    Mutation(
        "a contribution that was refused is not due where as many others are here",
        "comm/allreduce/dues.py",
        "if any(place not in collecting[c].arrived for c in first):",
        "if all(place not in collecting[c].arrived for c in collecting):",
        "tests/comm/allreduce/test_protocol.py",
    ),
    Mutation(
        "a late owner is asked for its own chunks alone",
        X,
        "out += self.pull(c, source) or self.pull(c) or self._exhaust(c)",
        "out += [SendFrame(source, FrameKind.WANT, c, self._chunks[c].since)]",
        CONTROL,
    ),
    Mutation(
        "a question after a break is not answered",
        "comm/allreduce/control_frames.py",
        "ANSWERS.get(c)",
        "ANSWERS.get(-1)",
        CONTROL,
    ),
    Mutation(
        "what was lost with the last link is not asked for",
        "comm/transport/link_policy.py",
        "        self._resync_due = not links\n",
        "        self._resync_due = False\n",
        LINKS,
    ),
    Mutation(
        "the other side never dials",
        "comm/transport/link_policy.py",
        "LeafMissing(self._times.leaf) if self.leaf else",
        "LeafMissing(self._times.leaf) if self.leaf or not self.primary else",
        LINKS,
    ),
    Mutation(
        "frames of a round to come are dropped",
        "comm/transport/frame_handler.py",
        "        return RoundOrder.AHEAD\n",
        "        return RoundOrder.OVER\n",
        "tests/comm/transport/test_frame_handler.py",
    ),
    Mutation(
        "two leaves wait for each other's links",
        "comm/allreduce/routes.py",
        " and not (m.leaf and own.leaf)",
        "",
        INBOX,
    ),
    Mutation(
        "memory that a merge reads is used again",
        "comm/allreduce/inbox.py",
        "return [] if self._readers[c] else freed",
        "return freed",
        INBOX,
    ),
    Mutation(
        "this member's own contribution is left out",
        "comm/allreduce/inbox.py",
        "for i in order.inputs if i not in inside}",
        "for i in order.inputs if i not in inside and members[i].node != self._me}",
    ),
]
