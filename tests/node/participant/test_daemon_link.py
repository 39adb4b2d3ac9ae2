import sys

from atoll.comm.errors import ConfigError
from atoll.node.participant.batches import Share
from atoll.node.participant.daemon_link import script_place


def test_the_line_of_the_script_is_named_that_called_what_raised() -> None:
    line = 0
    try:
        line = sys._getframe().f_lineno + 1
        Share(0, 3).of(4)
    except ConfigError as error:
        assert script_place(error) == f' (File "{__file__}", line {line})'
    assert line and script_place(ConfigError("never raised")) == ""
