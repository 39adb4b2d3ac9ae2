"""The exchange of chunks between members."""

from sim.mutations.mutation import EXCHANGE, LEVELS, Mutation, X

MUTATIONS = [
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
        slow=True,
    ),
    Mutation(
        "a newer attempt is not told of what is held",
        X,
        "if not missing and self._complete_attempt != attempt and",
        "if not missing and self._complete_attempt < 0 and",
        11,
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
]
