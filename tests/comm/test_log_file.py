"""A log file has a bounded size, and all that a process prints."""

import subprocess
import sys
from pathlib import Path

from atoll.comm.log_file import FORMER_FILES

PROGRAM = """
import logging, os, sys
from atoll.comm import log, log_file
log_file.LIMIT_BYTES = 2000
log_file.LogFile.__init__.__defaults__ = (2000,)
log.setup(log.LogSetup("node", file=sys.argv[1]))
for number in range(int(sys.argv[2])):
    logging.getLogger("atoll").info(f"line {number:06d}")
os.write(1, b"of a library\\n")
os.write(2, b"of a dying interpreter\\n")
print("printed")
print(log.beside("gateway").file)
raise SystemExit("the last sentence")
"""


def write(file: Path, lines: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", PROGRAM, str(file), str(lines)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_everything_a_process_prints_is_in_the_file_and_nothing_on_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "node.log"
    done = write(file, 3)
    assert (done.stdout, done.stderr) == ("", "")
    said = file.read_text()
    assert f"{file.parent}/node-gateway.log\n" in said
    for words in ("line 000002", "of a library", "of a dying interpreter", "printed", "the last sentence"):
        assert words in said
    assert [path.name for path in file.parent.iterdir()] == ["node.log"]
    assert file.stat().st_mode & 0o077 == 0
    write(file, 1)
    assert file.read_text().startswith(said), "another life goes on where the last one ended"


def test_there_are_so_many_files_and_none_is_much_larger_than_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "node.log"
    write(file, 2000)
    names = ["node.log", *(f"node.log.{n + 1}" for n in range(FORMER_FILES))]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(path.stat().st_size < 2500 for path in tmp_path.iterdir())
    numbers = [
        int(line.split("line ")[1])
        for name in reversed(names)
        for line in (tmp_path / name).read_text().splitlines()
        if "line " in line
    ]
    assert numbers == list(range(numbers[0], 2000)), "in order, without a gap"
    assert "the last sentence" in file.read_text()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = write(tmp_path / "file" / "node.log", 1)
    assert "ResourceError: cannot write the log" in done.stderr
