"""What the coordinator decides before it serves: encryption, and whether the state directory is this run's."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import RunConfig, SecurityConfig, TlsMode, to_json
from atoll.comm.errors import ConfigError
from atoll.coordinator.server import ServerOptions, _same_run, encrypted
from atoll.coordinator.service.journal import Journal


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", False),
        ("127.8.8.8:0", "localhost:4700", False),
        ("[::1]:0", "[::1]:4700", False),
        ("localhost:0", "", False),
        ("0.0.0.0:0", "", True),
        (":0", "", True),
        ("[::]:0", "", True),
        ("10.0.0.1:0", "", True),
        ("127.0.0.1:0", "reef.example.org:4700", True),  # something forwards to it
        ("0.0.0.0:0", "127.0.0.1:4700", True),
    ],
)
def test_tls_is_on_unless_everything_is_loopback(listen: str, advertise: str, expected: bool) -> None:
    options = ServerOptions(Path(), listen, "127.0.0.1:0", advertise)
    assert encrypted(RunConfig(), options) is expected
    for mode in (TlsMode.ON, TlsMode.OFF):
        assert encrypted(RunConfig(security=SecurityConfig(mode)), options) is (mode is TlsMode.ON)


def test_a_state_directory_of_the_same_run_may_be_older_than_a_key_of_its_config(tmp_path: Path) -> None:
    config = RunConfig(name="reef")
    older = msgspec.json.decode(to_json(config))
    del older["security"]
    with closing(Journal(tmp_path)) as journal:
        journal.set_meta("config", msgspec.json.encode(older).decode())
        _same_run(journal, config)
        for other, differs in (
            (RunConfig(name="reef", outer=OuterConfig(lr=0.1)), "outer.lr is 0.9 there and 0.1 here"),
            (
                RunConfig(name="reef", security=SecurityConfig(TlsMode.ON)),
                "security.tls is 'auto' there and 'on' here",
            ),
            (RunConfig(name="sea", seed=1), "name is 'reef' there and 'sea' here, seed is 0 there and 1 here"),
        ):
            with pytest.raises(ConfigError, match=rf"another config \({differs}\): start with"):
                _same_run(journal, other)
