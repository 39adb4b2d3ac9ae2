"""What is credited to whom."""

from sim.mutations.mutation import C, Mutation

CREDIT = "tests/coordinator/state_machine/test_credit.py"

MUTATIONS = [
    Mutation(
        "work of a void round is credited",
        C + "state_machine/rollback.py",
        "        credit=take_back(state.credit, j),\n",
        "",
        CREDIT,
    ),
    Mutation(
        "credit that may yet be taken back is forgotten",
        C + "state_machine/credit.py",
        "tuple(r for r in recent if r.round > oldest)",
        "tuple(r for r in recent if r.round >= round_)",
        CREDIT,
    ),
    Mutation(
        "credit is not taken back any more, and kept in mind for ever",
        C + "state_machine/credit.py",
        "tuple(r for r in recent if r.round > oldest)",
        "recent",
        CREDIT,
    ),
    Mutation(
        "a node that comes back as another one begins a new account",
        C + "state_machine/reduce.py",
        "Work(conduct.identity(state, n), n,",
        "Work(str(n), n,",
    ),
    Mutation(
        "who contributed and is gone is forgotten before the round commits",
        C + "state_machine/changes.py",
        "return tuple(n for n in oldest if n not in entered)",
        "return oldest",
        CREDIT,
    ),
    Mutation(
        "an owner has a round for each of its nodes",
        C + "state_machine/credit.py",
        "rounds=its.rounds + first)",
        "rounds=its.rounds + 1)",
    ),
    Mutation(
        "who has only joined has an account",
        C + "state_machine/credit.py",
        "    if account is None or (named",
        "    if account is None:\n"
        "        account = NodeAccount(book.opened + 1, node, name, owner)\n"
        "        book = replace(book, opened=book.opened + 1, nodes=book.nodes | {who: account})\n"
        "    if (named",
    ),
]
