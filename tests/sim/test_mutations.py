"""The tests bite: every rule of the protocol that is taken out is noticed by some seed of the simulation or, where
hardly any seed needs it, by a test of its own. `make test` takes out every sixth, `make test-long` the others.

Each mutation: its name; the file; the line as it is, and as it must not be; the seed to start at, to save time, or
the tests.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

MUTANT = Path(__file__).with_name("mutant.py")
SEEDS = 60


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    by: int | str = 0  # the seed to start at; tests


C, N, X = "coordinator/", "node/", "comm/allreduce/protocol.py"
SCENARIOS, LEDGER = (
    "tests/coordinator/state_machine/test_transcripts.py",
    "tests/coordinator/state_machine/test_ledger.py",
)
EXCHANGE, NODE = "tests/comm/allreduce/test_protocol_attempts.py", "tests/node/state_machine"
LEVELS = "tests/comm/allreduce/test_protocol_levels.py"
LATE, INBOX = "tests/comm/allreduce/test_late_peers.py", "tests/comm/allreduce/test_inbox.py"
CONTROL = "tests/comm/allreduce/test_control_frames.py"
LINKS, POLICY = "tests/comm/transport/test_link_policy.py", "tests/node/checkpoint/test_policy.py"
MUTATIONS = [
    # The ledger
    Mutation(
        "the last seal wins",
        C + "state_machine/ledger.py",
        "            sealed.setdefault(chunk, Seal(digest, inputs))",
        "            sealed[chunk] = Seal(digest, inputs)",
        4,
    ),
    Mutation(
        "anybody may seal a chunk",
        C + "state_machine/ledger.py",
        "ledger.owners[chunk] == node and ledger.since",
        "ledger.since",
    ),
    Mutation(
        "a seal from before its owner got the chunk anew counts",
        C + "state_machine/ledger.py",
        " and ledger.since[chunk] == since\n",
        "\n",
    ),
    Mutation(
        "a chunk with nobody's contribution is sealed",
        C + "state_machine/ledger.py",
        "if owned and any(bit(inputs, i) for i, e in enumerate(ledger.entries) if e.contribution is not None):",
        "if owned:",
    ),
    Mutation(
        "seals of other rounds count",
        C + "state_machine/reduce.py",
        "    if event.fence.round != r.number:\n        return state\n    ledger = book.seal",
        "    ledger = book.seal",
        31,
    ),
    Mutation(
        "held bytes of earlier owners' chunks count",
        C + "state_machine/reduce.py",
        "late = event.fence.round != r.number or (attempt < ledger.attempt and attempt < ledger.newest)",
        "late = event.fence.round != r.number",
        4,
    ),
    Mutation(
        "who held everything before a chunk was reopened still does",
        C + "state_machine/reduce.py",
        " if n in members and h.fence.attempt >= ledger.newest}",
        " if n in members}",
    ),
    Mutation(
        "who came back still holds what it held",
        C + "state_machine/state.py",
        "completions={n: h for n, h in r.completions.items() if n != node},",
        "completions=r.completions,",
        10,
    ),
    Mutation(
        "an attempt number is used twice",
        C + "state_machine/ledger.py",
        "    attempt = ledger.attempt + 1\n",
        "    attempt = max(ledger.attempt, 1)\n",
    ),
    Mutation(
        "the place of one that is gone is given away",
        C + "state_machine/ledger.py",
        "[replace(e, gone=e.gone or wanted.get(e.node, e) != e.contribution) for e in ledger.entries]",
        "[e for e in ledger.entries if not e.gone and wanted.get(e.node, e) == e.contribution]",
    ),
    Mutation(
        "one that came back has its old place",
        C + "state_machine/ledger.py",
        "gone=e.gone or wanted.get(e.node, e) != e.contribution)",
        "gone=e.node not in wanted)",
    ),
    Mutation(
        "a chunk that changes its owner has it since before",
        C + "state_machine/ledger.py",
        "        owners[c], since[c] = None, attempt\n",
        "        owners[c] = None\n",
    ),
    Mutation(
        "sealed chunks of one that is gone are done again",
        C + "state_machine/ledger.py",
        "free = [c for c in lost if c not in ledger.sealed]",
        "free = lost",
        4,
    ),
    Mutation(
        "orphans go to who holds anything of them",
        C + "state_machine/ledger.py",
        "if chunks.get(c) == sealed[c].digest]",
        "if c in chunks]",
    ),
    Mutation(
        "an orphan that nobody holds stays sealed",
        C + "state_machine/ledger.py",
        "            del sealed[c]\n",
        "",
    ),
    Mutation(
        "orphans are given away before all told what they hold",
        C + "state_machine/reduce.py",
        "if len(plan_.orphans) >= len(left) and ledger.orphans and all(n in plan_.orphans for n in left):",
        "if ledger.orphans and set(plan_.orphans) == set(ledger.members[:1]):",
    ),
    Mutation(
        "what members told of the orphans of an earlier attempt counts",
        C + "state_machine/reduce.py",
        "if r.plan is None or r.plan.fence != event.fence or event.node not in r.ledger.members:",
        "if r.plan is None or event.node not in r.ledger.members:",
    ),
    Mutation(
        "the weight counts one sample less",
        C + "state_machine/weights.py",
        "float(count * config.model.seq_len)",
        "float((count - 1) * config.model.seq_len)",
    ),
    Mutation(
        "who comes later changes what the others count",
        C + "state_machine/weights.py",
        "if e.since == first and e.contribution]",
        "if e.contribution]",
    ),
    Mutation(
        "an outsized delta counts in full",
        "outer_opt/clip.py",
        "limit / n if n > limit else 1.0",
        "1.0",
    ),
    Mutation(
        "a weight of quality is not bounded",
        "outer_opt/weights.py",
        "[min(w, QUALITY_BOUND * median(there)) for w in raw]",
        "raw",
        68,
    ),
    Mutation(
        "a part of a contribution counts as all of it",
        C + "state_machine/ledger.py",
        "Inclusion(longest, size / chunks.numel, samples)",
        "Inclusion(longest, 1.0, samples)",
    ),
    Mutation(
        "the last chunk is as large as the others",
        C + "state_machine/ledger.py",
        "sum(map(chunks.size, inside))",
        "chunks.largest * len(inside)",
    ),
    Mutation(
        "the contribution of a lost member stays",
        C + "state_machine/ledger.py",
        "contributions = {n: c for n, c in ledger.contributions.items() if n != node}",
        "contributions = ledger.contributions",
    ),
    # Two levels
    Mutation(
        "a chunk that lost a relay goes on in two levels",
        C + "state_machine/ledger.py",
        "        or any(entries[row[c]].gone for row in ledger.relays)\n",
        "",
        LEDGER,
    ),
    Mutation(
        "a chunk that lost a relay is flat for those who heard of it",
        C + "state_machine/ledger.py",
        "    for c in broken:\n        since[c] = attempt\n",
        "",
        LEDGER,
    ),
    Mutation(
        "a sum is of all that is there",
        X,
        "if self._routes.contributes_here(c, place)}",
        "if False}",
        8,
    ),
    Mutation(
        "a region's sum goes out as a contribution",
        X,
        "return FrameKind.PARTIAL if self._chunks[c].relayed else FrameKind.CONTRIBUTION",
        "return FrameKind.CONTRIBUTION",
        8,
    ),
    # Rounds
    Mutation(
        "a contribution to another round counts",
        C + "state_machine/rounds.py",
        "if event.round != r.number or node not in r.participants",
        "if node not in r.participants",
        SCENARIOS,
    ),
    Mutation(
        "a contribution from another lease counts",
        C + "state_machine/rounds.py",
        "if not lease or work.front != data.front(lease) or",
        "if not lease or",
    ),
    Mutation(
        "one that lost its work still counts",
        C + "state_machine/step.py",
        "        state = drop_from_round(state, node)\n    members = who.join",
        "        pass\n    members = who.join",
    ),
    Mutation(
        "the round does not wait for a quorum",
        C + "state_machine/rounds.py",
        "if len(able) < max(need, state.config.members.minimum) or not reachable(state, able):",
        "if not able:",
        10,
    ),
    Mutation(
        "the round waits for suspects",
        C + "state_machine/rounds.py",
        "waited_for = [n for n in trusted if n not in contributions]",
        "waited_for = [n for n in r.participants if n not in contributions]",
    ),
    Mutation(
        "a round closes without a quorum",
        C + "state_machine/rounds.py",
        "    if done < quorum(state):",
        "    if not done:",
    ),
    Mutation(
        "an attempt may have too few members",
        C + "state_machine/reduce.py",
        "return members if len(members) >= need and reachable(state, members) and now >= r.paused_until else ()",
        "return members if now >= r.paused_until else ()",
        4,
    ),
    # The commit
    Mutation(
        "a round commits before all hold it",
        C + "state_machine/reduce.py",
        "    answered = len(r.completions)",
        "    left = [n for n in left if n in r.completions] or left\n    answered = len(r.completions)",
    ),
    Mutation(
        "a round commits whatever its members hold",
        C + "state_machine/reduce.py",
        "        if all(n in r.completions and r.completions[n].digest == root for n in left):\n",
        "        if all(n in r.completions for n in left):\n",
    ),
    Mutation(
        "an attempt may take for ever",
        C + "state_machine/reduce.py",
        "if now - plan_.opened_at > state.config.rounds.reduce_timeout:",
        "if now - plan_.opened_at > 1e9:",
        1,
    ),
    Mutation(
        "commits do not consume",
        C + "state_machine/reduce.py",
        "data.consume_each(state.leases, used)",
        "data.consume_each(state.leases, {})",
    ),
    Mutation(
        "a round number is left out",
        C + "state_machine/reduce.py",
        "        committed=r.number,",
        "        committed=r.number + 1,",
    ),
    Mutation(
        "a record names another attempt",
        C + "state_machine/reduce.py",
        "        attempts=ledger.attempt,",
        "        attempts=1,",
    ),
    Mutation(
        "a record is dropped when the next round commits",
        C + "state_machine/reduce.py",
        "now: float, out: list[Effect]) -> State:\n    state = publish(state, out)\n    r, ledger",
        "now: float, out: list[Effect]) -> State:\n    publish(state, [])\n    r, ledger",
        SCENARIOS,
    ),
    Mutation(
        "a record is published twice",
        C + "state_machine/state_sync.py",
        "return with_round(replace(state, pending=None), replace(state.round, evaluator=None))",
        "return with_round(state, replace(state.round, evaluator=None))",
    ),
    # Leases
    Mutation(
        "a lease is not released when its node leaves",
        C + "state_machine/state.py",
        "        state = replace(state, leases=data.release(_used(state, node), node))",
        "        pass",
        3,
    ),
    Mutation(
        "samples of one that left and may be committed are leased again",
        C + "state_machine/state.py",
        "data.release(_used(state, node), node)",
        "data.release(state.leases, node)",
        10,
    ),
    Mutation(
        "a dead member's part does not consume",
        C + "state_machine/reduce.py",
        "for n, p in parts.items() if held_.get(n)}",
        "for n, p in parts.items() if held_.get(n) and n in members_}",
    ),
    Mutation(
        "a commit consumes whatever lease its contributors have by now",
        C + "state_machine/reduce.py",
        "p.samples.get(data.front(held_[n]), 0)",
        "max(p.samples.values())",
        101,
    ),
    Mutation(
        "who the round was committed without is taken for one that applies it",
        C + "service/view.py",
        "member.state_round == state.committed - 1 and member.node in state.makers",
        "member.state_round == state.committed - 1",
        301,
    ),
    Mutation(
        "who cannot make the first state that leaves have makes it again and again",
        C + "service/view.py",
        "(lacks and common.leaves_only and not me.state_digest)",
        "(lacks and common.leaves_only)",
        "tests/coordinator/service/test_view_streams.py",
    ),
    Mutation(
        "a reducer that was late is dealt chunks again",
        C + "state_machine/chunk_owners.py",
        "if n not in lost and not here[n].late)",
        "if n not in lost)",
        SCENARIOS,
    ),
    Mutation(
        "what came too late for any chunk consumes",
        C + "state_machine/reduce.py",
        "p.samples.get(data.front(held_[n]), 0)",
        "book.contributed_samples(ledger, n, data.front(held_[n]))",
        SCENARIOS,
    ),
    Mutation(
        "a lying member is not looked for",
        C + "state_machine/disputes.py",
        "    if layered or not r.settled.issuperset(members):",
        "    if True:",
    ),
    Mutation(
        "who was told which bytes differ is told again for ever",
        C + "state_machine/disputes.py",
        "        return with_round(state, replace(state.round, completions=right, wrong=r.wrong.union(wrong)))",
        "        return with_round(state, replace(state.round, completions=right))",
        4,
    ),
    Mutation(
        "a released lease stays with its node too",
        C + "state_machine/leases.py",
        "if n != node}\n    return replace(leases, by_node=held, free=",
        "}\n    return replace(leases, by_node=held, free=",
        3,
    ),
    Mutation(
        "free samples are leased twice",
        C + "state_machine/leases.py",
        "free = ((first + taken, some - taken), *others) if some > taken else tuple(others)",
        "free = tuple(others) if len(others) > 1 else free",
        10,
    ),
    # States and digests
    Mutation(
        "the first to tell names the digest",
        C + "state_machine/state_sync.py",
        "if not votes or (2 * votes <= len(voters) and len(told) < len(voters)):",
        "if not votes:",
        2,
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
        14,
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
        "return _void(state, past, now, out) if (late and heard) or all_back else state",
        "return _void(state, past, now, out)",
        10,
    ),
    Mutation(
        "the run waits for a lost state for ever",
        C + "state_machine/rollback.py",
        "return _void(state, past, now, out) if (late and heard) or all_back else state",
        "return state",
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
    # The node
    Mutation(
        "a node takes in older views",
        N + "state_machine/step.py",
        "if state.view is not None and _order(view) <= _order(state.view):",
        "if False:",
        8,
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
        1,
    ),
    Mutation(
        "what a trainer left when it died is gone on from",
        N + "state_machine/step.py",
        "replace(state.turns, from_local=False)\n        state = replace(state, work=state",
        "state.turns\n        state = replace(state, work=state",
        1,
    ),
    # The exchange
    Mutation(
        "an owner has a contribution twice",
        X,
        "            chunk.arrived -= routes.former  # ",
        "            pass  # ",
        EXCHANGE,
    ),
    Mutation(
        "a contribution counts for whatever place its sender has now",
        X,
        "if since != chunk.since or self._routes.places.get(node) != place:",
        "if since != chunk.since:",
        26,
    ),
    Mutation(
        "a reopened chunk is kept",
        X,
        "        if not kept and chunk.digest is not None:",
        "        if False:",
    ),
    Mutation(
        "after a break nothing is sent again",
        X,
        "            elif not bit(here, c) or unheard:",
        "            elif False:",
        4,
    ),
    Mutation(
        "an owner does not wait for all",
        X,
        "if due <= chunk.arrived:",
        "if due & chunk.arrived:",
        9,
    ),
    Mutation(
        "a newer attempt is not told of what is held",
        X,
        "if not missing and self._complete_attempt != attempt and",
        "if not missing and self._complete_attempt < 0 and",
    ),
    Mutation(
        "a life is taken for the one before",
        X,
        "self._routes.places.get(node) != place:",
        "node not in self._routes.places:",
        EXCHANGE,
    ),
    Mutation(
        "what was held as its link broke is not sent again",
        X,
        "bit(here, c) or unheard:",
        "bit(here, c) and not unheard:",
        EXCHANGE,
    ),
    Mutation(
        "a lost question is not asked again",
        X,
        "if chunk.asked and chunk.asked[-1] == node:\n",
        "if False:\n",
        EXCHANGE,
    ),
    Mutation(
        "what a skipped plan kept is taken for known", X, "late = skipped or c not in", "late = c not in", EXCHANGE
    ),
    Mutation(
        "a member that came back believes what was said of it before",
        X,
        "max(self._chunks[c].since, self._entry_attempt) > attempt",
        "self._chunks[c].since > attempt",
        EXCHANGE,
    ),
    Mutation(
        "after a refusal nobody looks whether all is there",
        X,
        "return self._merge_if_complete(c)  # its",
        "return []  #",
        EXCHANGE,
    ),
    Mutation("a refused sum still counts", X, "chunk.region_sums.pop(place, (place,))", "(place,)", LEVELS),
    Mutation(
        "a lost chunk comes again from its relay only",
        X,
        "chunk.state = ChunkState.SERVED if chunk.relayed else ChunkState.SEALED",
        "chunk.state = ChunkState.SEALED",
        LEVELS,
    ),
    Mutation(
        "relays get no sealed chunks",
        "comm/allreduce/routes.py",
        "self.contributes(place) or self.plan.relays_for(c, place)\n        return",
        "self.contributes(place)\n        return",
        LEVELS,
    ),
    # Links, late peers and merges
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
    ),
    Mutation(
        "a late owner is asked for its own chunks alone",
        X,
        "out += self.pull(c, source) or self.pull(c)\n",
        "out += [SendFrame(source, FrameKind.WANT, c, self._chunks[c].since)]\n",
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
        20,
    ),
    Mutation(
        "two leaves wait for each other's links",
        "comm/allreduce/routes.py",
        " and not (m.leaf and leaf)]",
        "]",
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
    # The disk
    Mutation(
        "the log is dropped before the snapshot that replaces it",
        N + "checkpoint/policy.py",
        "if round_ <= needed or size",
        "if True or size",
        POLICY,
    ),
    Mutation(
        "a torn snapshot counts though the log lacks a round",
        N + "checkpoint/policy.py",
        "return newest if newest >= last else -1",
        "return newest",
        POLICY,
    ),
    Mutation(
        "a state that was not the run's stays on the disk",
        N + "checkpoint/policy.py",
        "needed, self._distrusted\n",
        "needed, False\n",
        POLICY,
    ),
    Mutation(
        "what cannot be had from the log gets no snapshot",
        N + "checkpoint/policy.py",
        "needed = sole_copy or disk.reach < round_ or self._distrusted",
        "needed = sole_copy or self._distrusted",
        POLICY,
    ),
    Mutation(
        "a contribution does not wait for an urgent snapshot",
        N + "checkpoint/policy.py",
        "return self._running and (self._urgent or self._following is not None)",
        "return False",
        POLICY,
    ),
]


def run(mutation: Mutation) -> tuple[int, str]:
    """Exit code and output of the seeds, or tests, until one notices."""
    by = [mutation.by] if isinstance(mutation.by, str) else [str(mutation.by), str(SEEDS)]
    args = [mutation.file, mutation.old, mutation.new, *by]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(MUTANT.parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-P", str(MUTANT), *args], capture_output=True, text=True, timeout=900, env=env
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def sample() -> set[str]:
    """Every sixth mutation of each file, by name: what `make test` looks at."""
    by_file: dict[str, list[str]] = {}
    for mutation in MUTATIONS:
        by_file.setdefault(mutation.file, []).append(mutation.name)
    return {name for names in by_file.values() for name in sorted(names)[::6]}


SAMPLE = sample()
PARAMETERS = [pytest.param(m, id=m.name, marks=[] if m.name in SAMPLE else [pytest.mark.long]) for m in MUTATIONS]


@pytest.mark.parametrize("mutation", PARAMETERS)
def test_it_is_noticed_that(mutation: Mutation) -> None:
    code, said = run(mutation)
    print(said)
    assert code == 0, said
