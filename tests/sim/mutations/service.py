"""The coordinator's journal and what its shells decide."""

from sim.mutations.mutation import C, Mutation

MUTATIONS = [
    # The journal
    Mutation(
        "what is decided shows before it is written",
        C + "service/journaled_machine.py",
        "        return Batch(now, state, entries, effects)",
        "        self.state = state\n        return Batch(now, state, entries, effects)",
        6,
    ),
    Mutation(
        "a plan is shown to all",
        C + "service/view.py",
        "planned=node in common.plan_nodes",
        "planned=bool(common.plan_nodes)",
    ),
    Mutation(
        "the last event of a batch is not written",
        C + "service/journaled_machine.py",
        "self._journal.append(batch.entries, ",
        "self._journal.append(batch.entries[:-1], ",
    ),
    Mutation(
        "a restart forgets the snapshot's time",
        C + "service/journaled_machine.py",
        "self.state, self.last_at = decode(found.body, config), found.at",
        "self.state, self.last_at = decode(found.body, config), 0.0",
        11,
    ),
    Mutation(
        "a snapshot leaves the events that it stands for",
        C + "service/journal.py",
        'self._db.execute("delete from events")',
        'self._db.execute("select 1")',
    ),
    Mutation(
        "commit records are not kept",
        C + "service/journaled_machine.py",
        "batch.records, batch.notes",
        "[], batch.notes",
    ),
    # The coordinator's shells
    Mutation(
        "the clock judges before it has heard who spoke",
        C + "service/group_commit.py",
        "        self._enter_heartbeats(now)\n        verdicts =",
        "        verdicts =",
    ),
    Mutation(
        "a coordinator that starts is no new incarnation",
        C + "service/group_commit.py",
        "Started(self._machine.state.incarnation + 1)",
        "Started(self._machine.state.incarnation)",
    ),
    Mutation(
        "the grace after the coordinator's own silence is forgotten",
        C + "service/tick_schedule.py",
        "        if now - self._ticked_at > MAX_TICK_GAP:",
        "        if False:",
    ),
    Mutation(
        "after its own silence the coordinator judges nobody any more",
        C + "service/tick_schedule.py",
        "now + members.RECONNECT_GRACE_SECONDS",
        "inf",
    ),
    Mutation(
        "a known session comes back as a new node",
        C + "service/sessions.py",
        "            return Admission(before.node, before.life + 1, before.session)",
        '            return Admission(NodeId(f"n{members.next_id}"), 1, fresh)',
    ),
    Mutation(
        "who comes back has its earlier life",
        C + "service/sessions.py",
        "before.life + 1",
        "before.life",
    ),
    Mutation(
        "an earlier life's session is good",
        C + "service/sessions.py",
        " if member is not None and str(member.life) == life else None",
        "",
    ),
    Mutation(
        "the session of one that is gone is good",
        C + "service/sessions.py",
        'member = members.here.get(self._nodes.get(secret, NodeId("")))',
        "member = self.holder(session, members)",
    ),
    Mutation(
        "a session that was given out is not entered",
        C + "service/sessions.py",
        "        self._nodes[secret] = node",
        "        pass",
    ),
    Mutation(
        "a stream is not shown a new plan",
        C + "service/view_dispatch.py",
        "plan = mine.planned and common.plan is not old.plan",
        "plan = False",
    ),
    Mutation(
        "a stream is not shown a new phase",
        C + "service/view_dispatch.py",
        "return common.head is not old.head or train",
        "return train",
    ),
    Mutation(
        "a change for all is shown to those whom an event touched",
        C + "service/view_dispatch.py",
        " if nodes is not None and same else",
        " if nodes is not None else",
    ),
    Mutation(
        "a new stream waits for the next change",
        C + "service/view_dispatch.py",
        "        self._fresh.add(node)",
        "        pass",
    ),
    Mutation(
        "the stream of an earlier life goes on",
        C + "service/view_dispatch.py",
        "if member is not None and member.life != stream.life:",
        "if False:",
    ),
    Mutation(
        "the stream of one that is gone goes on",
        C + "service/view_dispatch.py",
        "        if member is None:\n            stream.end()",
        "        pass",
    ),
    Mutation(
        "a stream that breaks takes the node's next one with it",
        C + "service/view_dispatch.py",
        "if self.streams.get(stream.node) is not stream:",
        "if stream.node not in self.streams:",
    ),
    Mutation(
        "a reason that was held back is not shown",
        C + "service/view_dispatch.py",
        "                self.update_at = reason_at",
        "                pass",
    ),
    Mutation(
        "a reason is held back and the new phase with it",
        C + "service/view_dispatch.py",
        "if new.facts is old.facts and now <",
        "if now <",
    ),
    Mutation(
        "who has no stream is told that it has all views",
        C + "service/view_dispatch.py",
        "return self._version + 1",
        "return 0",
    ),
    Mutation(
        "who has the latest view is told of newer ones",
        C + "service/view_dispatch.py",
        "return stream.latest.version if",
        "return self._version if",
    ),
]
