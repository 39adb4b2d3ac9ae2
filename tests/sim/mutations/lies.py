"""What a member says of itself and others, and what is believed of it."""

from sim.mutations.mutation import C, Mutation

SLOW = "tests/coordinator/state_machine/test_slow_links.py"
LIES = "tests/coordinator/state_machine/test_lies.py"
NORMS = "tests/coordinator/state_machine/test_norms.py"
SCORES = "tests/coordinator/state_machine/test_delta_scores.py"

MUTATIONS = [
    Mutation(
        "all wait for who says that its link is slow",
        C + "state_machine/step.py",
        "state, members = slow_links.in_turn(rounds.go_on_without(state, now, out), members, out)",
        "state = rounds.go_on_without(state, now, out)",
        SLOW,
    ),
    Mutation(
        "who was left out for its slow link is in the next attempt",
        C + "state_machine/reduce.py",
        "if state.members.trusted(n) and n not in r.slow)",
        "if state.members.trusted(n))",
        SLOW,
    ),
    Mutation(
        "a slow member never has its turn",
        C + "state_machine/slow_links.py",
        "may = turns * max(",
        "may = max(",
        SLOW,
    ),
    Mutation(
        "a node's word on its own link is believed",
        C + "state_machine/members.py",
        "return min(self.up, self.seen_up), min(self.down, self.seen_down)",
        "return self.up, self.down",
        LIES,
    ),
    Mutation(
        "one witness of a link is believed whatever it says",
        C + "state_machine/link_rates.py",
        "return min(whole, 2 * (whole - largest))",
        "return whole",
        LIES,
    ),
    Mutation(
        "a member may own everything",
        C + "state_machine/chunk_owners.py",
        "SHARE_LIMIT = 2.0",
        "SHARE_LIMIT = 1e9",
        LIES,
    ),
    Mutation(
        "a delta weighs what its node says",
        C + "state_machine/weights.py",
        "tokens, steps, founders), config.security.weight_bound, founders)",
        "tokens, steps, founders), 0, founders)",
        LIES,
    ),
    Mutation(
        "a node has trained since before it joined",
        C + "state_machine/members.py",
        "counted_at=known.counted_at if known is not None else now,",
        "counted_at=known.counted_at if known is not None else 0.0,",
        LIES,
    ),
    Mutation(
        "nobody looks at norms",
        C + "state_machine/norms.py",
        "limit = told * ratio\n        if square > limit * limit:",
        "if False:",
        0,
        slow=True,
    ),
    Mutation(
        "one owner's word is enough",
        C + "state_machine/norms.py",
        "if whole - voices[loudest] > squares or before - {loudest}:",
        "if True:",
        NORMS,
    ),
    Mutation(
        "a seal without norms is taken",
        C + "state_machine/ledger.py",
        "            if len(told) != NORM_BYTES * terms:\n                continue\n",
        "            if told and len(told) != NORM_BYTES * terms:\n                continue\n",
        NORMS,
    ),
    Mutation(
        "what was sealed with a false delta stays",
        C + "state_machine/norms.py",
        "    ledger = book.unseal(r.ledger, frozenset(_with_place(r.ledger, place)))\n",
        "    ledger = r.ledger\n",
        NORMS,
    ),
    Mutation(
        "who doubted a delta looks at it again",
        C + "state_machine/ledger.py",
        "owners[c] = chosen if chosen in staying else owner",
        "owners[c] = owner",
        NORMS,
    ),
    Mutation(
        "one voice says where a delta points",
        C + "state_machine/delta_scores.py",
        "MIN_VOICES = 3  #",
        "MIN_VOICES = 1  #",
        SCORES,
    ),
    Mutation(
        "the loudest voice is believed",
        C + "state_machine/delta_scores.py",
        "    low, high = median_low(offsets), median_high(offsets)\n",
        "    low = high = max(offsets, key=abs)\n",
        SCORES,
    ),
    Mutation(
        "a voice is held against all others",
        C + "state_machine/delta_scores.py",
        "offsets.setdefault(node, []).append(cosine - middle)",
        "offsets.setdefault(node, []).append(cosine - middles[0])",
        SCORES,
    ),
    Mutation(
        "who speaks of itself is heard",
        C + "state_machine/delta_scores.py",
        "if place >= 0 and nodes[place] != seal.by:",
        "if place >= 0:",
        SCORES,
    ),
    Mutation(
        "work that was left out points where it did",
        C + "state_machine/delta_scores.py",
        "if n in here and not here[n].missed and n not in few]",
        "if n in here and n not in few]",
        SCORES,
    ),
    Mutation(
        "a short round is an odd one",
        C + "state_machine/delta_scores.py",
        "    norms = _lengths([work[n].norm for n in nodes], [n in few for n in nodes])\n",
        "    norms = [work[n].norm for n in nodes]\n",
        SCORES,
    ),
    Mutation(
        "what few steps point to is odd",
        C + "state_machine/delta_scores.py",
        "if n in here and not here[n].missed and n not in few]",
        "if n in here and not here[n].missed]",
        SCORES,
    ),
    Mutation(
        "nobody looks where deltas point",
        C + "state_machine/reduce.py",
        "            state = charge_outliers(state, out)\n",
        "",
        SCORES,
    ),
    Mutation(
        "dots of other terms are taken",
        C + "state_machine/ledger.py",
        '    return told if len(told) == NORM_BYTES * (1 + terms) else b""\n',
        "    return told\n",
        SCORES,
    ),
]
