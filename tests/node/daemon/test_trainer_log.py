import tracemalloc
from pathlib import Path

import pytest

from atoll.comm.errors import ResourceError
from atoll.node.daemon.last_words import LastWords
from atoll.node.daemon.trainer_log import TrainerLog


def test_a_log_beyond_its_limit_begins_anew_under_the_process_that_writes_it(tmp_path: Path) -> None:
    log = TrainerLog(tmp_path, limit=100)
    log.bound()
    with log.open() as trainer:
        for number in range(12):
            trainer.write(b"%029d\n" % number)
            trainer.flush()
            log.bound()
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert sizes == [0, 120], "no more than the limit, but for what was written since anybody looked"
    assert (tmp_path / "trainer.log.1").read_bytes().endswith(b"%029d\n" % 11)


def test_the_end_of_a_long_log_is_found_without_reading_it(tmp_path: Path) -> None:
    with TrainerLog(tmp_path).open() as trainer:
        trainer.truncate(64 << 20)
        trainer.write(b"\nValueError: no\n\n")
    tracemalloc.start()
    try:
        assert TrainerLog(tmp_path).last_words() == (LastWords("ValueError: no"), tmp_path / "trainer.log")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_trainer_that_said_nothing_and_a_log_that_is_gone_are_said_to_be_so(tmp_path: Path) -> None:
    TrainerLog(tmp_path).open().close()
    assert TrainerLog(tmp_path).last_words()[0] == LastWords("")
    with pytest.raises(ResourceError, match="cannot read .*trainer.log: No such file"):
        TrainerLog(tmp_path / "elsewhere").last_words()


def test_what_an_earlier_trainer_ended_of_is_not_told_of_the_next(tmp_path: Path) -> None:
    log = TrainerLog(tmp_path)
    for line in (b"ValueError: of the first\n", b""):
        with log.open() as trainer:
            trainer.write(line)
    assert log.last_words()[0] == LastWords("")


def test_a_full_disk_does_not_keep_a_log_from_being_bounded(tmp_path: Path) -> None:
    log = TrainerLog(tmp_path, limit=100)
    (tmp_path / "trainer.log").write_bytes(b"x" * 200)
    (tmp_path / "trainer.log.1").symlink_to("/dev/full")
    log.bound()
    assert (tmp_path / "trainer.log").stat().st_size == 0
    assert not (tmp_path / "trainer.log.1").exists(), "what was copied of it is not the log, and takes room"


def test_the_last_line_is_found_where_the_log_was_moved_just_before(tmp_path: Path) -> None:
    log = TrainerLog(tmp_path, limit=10)
    (tmp_path / "trainer.log").write_bytes(b"ValueError: no such model\n")
    log.bound()
    assert log.last_words() == (LastWords("ValueError: no such model"), tmp_path / "trainer.log.1")
