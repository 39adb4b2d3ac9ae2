"""A run whose engine is torchtitan: real processes, on its debug model on a CPU (`titan_on_cpu`)."""

import psutil
from e2e.harness import Run, until
from titan.conftest import MODULE

START = (
    *("engine=torchtitan", "titan.config=llama3_debugmodel", "inner.optimizer=adamw", "inner.lr=0.001"),
    *("model.seq_len=32", "titan.settings=[--training.local_batch_size=2]", "reduce.chunk=524160"),
)


def test_nodes_of_one_and_of_two_ranks_train_one_model_through_the_death_of_a_trainer(run: Run) -> None:
    run.start(*START, "rounds.total=4", "data.eval_every=2")
    url = run.invite(2)
    one, two = run.join(url, "one", MODULE), run.join(url, "two", MODULE, "ranks=2")
    until("the first commit", lambda: run.committed() >= 1, 300.0)
    for process in psutil.Process(two.pid).children(recursive=True):
        process.kill()
    assert one.wait(400) == 0 and two.wait(60) == 0
    records = run.rounds()
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    assert all(r["digests_equal"] for r in records)
    assert {len(r["contributors"]) for r in records} <= {1, 2} and len(records[0]["contributors"]) == 2
    assert "the trainer died" in run.log("two")
    assert records[-1]["train_loss"] < records[0]["train_loss"]


def test_a_node_without_an_accelerator_says_so_and_leaves(run: Run) -> None:
    run.start(*START)
    node = run.join(run.invite(1), "one", "device=cpu")
    assert node.wait(200) != 0
    assert "trains on an accelerator, and this machine has none" in run.log("one")
