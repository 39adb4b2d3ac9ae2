import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.node.daemon.last_words import LastWords, last_words

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Two ranks that say something at once write it into each other's lines.
SECOND_RANK_WAITS = "\nimport os, signal\nif os.environ['RANK'] == '1': signal.pause()\n"
NO_SUCH_THING = LastWords("ValueError: no such thing: 3", 1)


@pytest.mark.parametrize(
    "script, words",
    [
        (f"{SECOND_RANK_WAITS}print('rank 0')\nraise ValueError('no such thing: 3')", NO_SUCH_THING),
        *(
            pytest.param(script, words, marks=pytest.mark.long)  # each starts torchrun: seconds
            for script, words in (
                (
                    "import os\nprint('loading', flush=True)\nos.kill(os.getpid(), 9)",
                    LastWords("loading", -signal.SIGKILL),
                ),
                ("print('done')", LastWords("done")),
                (None, LastWords("can't open file", 2)),
            )
        ),
    ],
    ids=["raises", "killed", "returns", "missing"],
)
def test_torchruns_report_is_looked_through_to_what_the_first_rank_ended_of(
    tmp_path: Path, script: str | None, words: LastWords
) -> None:
    """torchrun itself, with two ranks."""
    path = tmp_path / "train.py"
    if script is not None:
        path.write_text(script)
    done = subprocess.run([*TORCHRUN, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    said = last_words(done.stdout.decode())
    assert words.line in said.line and said.exit_code == words.exit_code and not said.peer_gone


def test_rules_blank_lines_and_torchs_own_are_no_last_words() -> None:
    log = "KeyError: 'lr'\n\n=====\n*****\nW1123 12:17:05.143000 1 torch/distributed/run.py:874] \n  12 34\n"
    assert last_words(log) == LastWords("KeyError: 'lr'")
    assert last_words("\n---\n") == LastWords("")
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
    assert last_words(lost) == LastWords(lost, peer_gone=True)
