"""A verifier replays others' rounds."""

import pytest
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]

# A node that trains, and sends noise of the same length instead.
LIAR = """
import numpy as np
from atoll.node.daemon.round import RoundParticipation
encode, seen = RoundParticipation.encode, []
def lie(self, ready):
    if (ready.round, ready.front) not in seen:
        seen.append((ready.round, ready.front))
        v = self._outer.vectors
        length = np.linalg.norm(v.anchor - v.local)
        noise = np.random.default_rng(ready.front).normal(size=v.local.size)
        v.local[:] = v.anchor - noise * (length / np.linalg.norm(noise))
    return encode(self, ready)
RoundParticipation.encode = lie
from atoll.comm.cli import main
main()
"""


def test_who_sends_noise_is_found_and_the_verifier_contributes_nothing(run: Run) -> None:
    run.start("members.start=5", "members.minimum=3", "security.replay=1", "rounds.inner_steps=20")
    url = run.invite(5)
    run.join(run.invite(1, "--role", "verifier"), "v", "--role", "verifier")
    for name in "abde":
        run.join(url, name)
    run.join(url, "f", program=LIAR)
    until("the first rounds", lambda: run.committed() >= 3, 240.0)
    until("what is held against the liar", lambda: "false_work" in run.offences("f"), 240.0)
    verifier = run.member("v")["node_id"]
    assert run.member("v")["role"] == "verifier"
    assert all(verifier not in r["contributors"] for r in run.rounds())
