"""What a node's disk is given, and what it gives up."""

from sim.mutations.mutation import Mutation

POLICY = "tests/node/checkpoint/test_policy.py"

MUTATIONS = [
    Mutation(
        "the log is dropped before the snapshot that replaces it",
        "node/checkpoint/policy.py",
        "if round_ <= needed or size",
        "if True or size",
        POLICY,
    ),
    Mutation(
        "a torn snapshot counts though the log lacks a round",
        "node/checkpoint/policy.py",
        "return newest if newest >= last else -1",
        "return newest",
        POLICY,
    ),
    Mutation(
        "a state that was not the run's stays on the disk",
        "node/checkpoint/policy.py",
        "needed, self._distrusted\n",
        "needed, False\n",
        POLICY,
    ),
    Mutation(
        "what cannot be had from the log gets no snapshot",
        "node/checkpoint/policy.py",
        "needed = sole_copy or disk.reach < round_ or self._distrusted",
        "needed = sole_copy or self._distrusted",
        POLICY,
    ),
    Mutation(
        "a contribution does not wait for an urgent snapshot",
        "node/checkpoint/policy.py",
        "return self._running and (self._urgent or self._following is not None)",
        "return False",
        POLICY,
    ),
]
