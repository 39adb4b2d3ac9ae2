"""A bit flips in the memory of one node, in a vector that its processes share, while the run goes on."""

import re

import pytest
from e2e.harness import Run, flip, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_a_flipped_bit_is_found_at_the_next_commit_and_costs_its_chunk(run: Run) -> None:
    run.start("members.start=3", "rounds.inner_steps=30")
    url = run.invite(3)
    for name in ("one", "two", "three"):
        run.join(url, name, "durable=false")
    until("a commit of all", lambda: run.contributors() == 3)
    before = run.committed()
    flip(run, "two", "anchor", 21, 0)
    flipped = run.committed()  # rounds may have gone by since
    until("its repair", lambda: "chunks that differ" in run.log("two"))
    until("a commit of all", lambda: run.contributors(before + 2) == 3)
    two = run.member("two")
    wrong = [r for r in run.rounds(before) if not r["digests_equal"]]
    assert [n for r in wrong for n, d in r["digests"].items() if d != r["state_digest"]] == [two["node_id"]]
    assert wrong[0]["round"] <= flipped + 2
    told = [e["sentence"] for e in run.run()["events"] if e["node"] == two["node_id"]]
    assert any("differs from the run's" in sentence for sentence in told)
    fetched = re.search(r"chunks that differ.*?fetched (\d+) of \d+ chunks", run.log("two"), re.DOTALL)
    assert fetched is not None and fetched[1] == "1", "it fetched more than the chunk that differed"


@pytest.mark.chaos
def test_of_two_nodes_the_one_whose_memory_is_wrong_knows_it_and_mends_it_from_its_disk(run: Run) -> None:
    run.start("rounds.inner_steps=30", "checkpoint.every=2")
    url = run.invite(2)
    run.join(url, "one"), run.join(url, "two")
    until("a commit of both", lambda: run.contributors(2) == 2)
    before = run.committed()
    flip(run, "two", "anchor", 21, 1)

    def told() -> list[str]:
        return [e["sentence"] for e in run.run().get("events", []) if "changed in memory" in e["sentence"]]

    assert "two: 1 chunk of its state" in until("the node to tell", told)[0]
    until("two more commits", lambda: run.contributors(before + 2) == 2)
    run.whole(before + 2)
    assert "evicted" not in run.log("c") and "mended from the disk" in run.log("two")
