"""An accountant of a node that has no peers and whose coordinator always answers."""

from atoll.comm.transport.path_tally import PathTallies
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.round_account import Accountant


def accountant(tallies: PathTallies | None = None) -> Accountant:
    return Accountant(tallies or PathTallies(), ClockOffset(), lambda start, end: 0.0)
