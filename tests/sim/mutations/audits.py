"""Audits of sealed chunks: what is drawn, what counts as proof, who is convicted, what becomes of the round."""

from sim.mutations.mutation import C, Mutation

AUDIT, RUNS = (
    "tests/coordinator/state_machine/test_audit.py",
    "tests/coordinator/state_machine/test_audit_runs.py",
)
AUDITOR = "tests/comm/allreduce/test_auditor.py"
MACHINE, VOICES = C + "state_machine/audit.py", C + "state_machine/audit_voices.py"

MUTATIONS = [
    Mutation(
        "who is too slow for an audit is named for it",
        C + "state_machine/audit.py",
        "return down > 0 and len(places(audit.inputs)) * size > down * audit.seconds",
        "return False",
        "tests/coordinator/state_machine/test_audit.py",
        slow=True,
    ),
    Mutation(
        "the commit waits for no audit",
        C + "state_machine/reduce.py",
        "if everywhere and not r.audits:",
        "if everywhere:",
        AUDIT,
    ),
    Mutation(
        "what is drawn does not follow from the secret",
        MACHINE,
        "digest(what, state.nonce, r.salt, about, sealed)",
        "digest(what, about)",
        RUNS,
    ),
    Mutation(
        "an owner audits itself",
        MACHINE,
        "able = _able(state) - {audit.owner} - audit.silent",
        "able = _able(state) - audit.silent",
        AUDIT,
    ),
    Mutation("leaves audit", MACHINE, "n in here and not here[n].leaf and", "n in here and", AUDIT),
    Mutation("two voices convict", MACHINE, "MIN_VOICES = 3", "MIN_VOICES = 2", AUDIT),
    Mutation(
        "what a convicted owner sealed besides is committed",
        MACHINE,
        "book.made_by(r.ledger, nodes).union(chunks)",
        "set(chunks)",
        RUNS,
    ),
    Mutation(
        "who is in doubt owns chunks again",
        C + "state_machine/chunk_owners.py",
        "[n for n in reachable_ if n not in state.round.distrusted] or reachable_",
        "reachable_",
        AUDIT,
    ),
    Mutation(
        "an owner is convicted of a mean that was made of means",
        VOICES,
        'flaw = "it is made of other regions\' means" if _sums(receipt) else ""',
        'flaw = ""',
        AUDIT,
    ),
    Mutation(
        "an owner is convicted of what its relay should have refused",
        "comm/allreduce/auditor.py",
        "        except UnusableContribution:\n            return None",
        "        except UnusableContribution:\n            raise",
        AUDITOR,
    ),
    Mutation(
        "who shows half of the auditors nothing stays",
        MACHINE,
        "if accused >= 0 and",
        "if accused >= 0 and 2 * len(accusers[accused]) > total and",
        AUDIT,
    ),
    Mutation(
        "an owner may leave contributors out",
        C + "state_machine/ledger.py",
        'if must & ~int.from_bytes(inputs, "little"):',
        "if False:",
        AUDIT,
    ),
    Mutation(
        "two contents that nobody signed convict",
        VOICES,
        "if not all(record_.signed_by(key, salt_, audit.chunk) for record_ in (sent, other)):",
        "if False:",
        AUDIT,
    ),
    Mutation(
        "contributions are merged whoever signed them",
        "comm/allreduce/merge_executor.py",
        "if member.key and not record.signed_by(member.key, plan.salt, c):",
        "if False:",
        AUDITOR,
        slow=True,
    ),
    Mutation(
        "a node signs two contents of one chunk",
        "comm/allreduce/input_signer.py",
        "return record if (record.digest, record.inputs) == (digest, inputs) else None",
        "return sign_input(self.key, salt, chunk, place, digest, inputs)",
        "tests/comm/allreduce/test_input_signer.py",
    ),
    Mutation(
        "an auditor takes whatever a contributor shows",
        "comm/allreduce/auditor.py",
        "if found == record.digest:",
        "if True:",
        AUDITOR,
    ),
    Mutation(
        "who was silent is named as before",
        MACHINE,
        "if _was_silent(state, n) or _is_too_slow(state, audit, n)]",
        "if _is_too_slow(state, audit, n)]",
        AUDIT,
    ),
    Mutation(
        "who is named in the place of a mute auditor has no more time",
        MACHINE,
        "longer = 2.0 if late",
        "longer = 1.0 if late",
        AUDIT,
    ),
    Mutation(
        "the time of an audit stands still while it waits",
        "node/daemon/audits.py",
        "max(until - clock(), 0.0)",
        "order.seconds",
        "tests/node/daemon/test_audits.py",
    ),
]
