"""Tables that commands print."""

import subprocess
import sys

CODE = """
from rich.table import Table

from atoll.comm.terminal import show_table

table = Table("run", *(f"column {i}" for i in range(20)))
table.add_row("demo", *(f"{i}.2345678901" for i in range(20)))
show_table(table)
"""


def test_a_table_goes_whole_into_a_pipe() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", CODE], env={}, capture_output=True, text=True, check=True)
    assert all(f"{i}.2345678901" in found.stdout for i in range(20))
