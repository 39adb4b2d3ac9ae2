"""What a node passes on for others goes from its owner's upload, and only while there is something."""

import pytest

from atoll.node.daemon.relay_share import BUSY_SECONDS, RelayShare, Shares


@pytest.mark.parametrize(
    ("upload", "rate", "idle", "busy"),
    [
        (0.0, 0.0, Shares(0.0, 0.0), Shares(0.0, 0.0)),  # no limits
        (0.0, 3.0, Shares(0.0, 3.0), Shares(0.0, 3.0)),
        (10.0, 0.0, Shares(10.0, 5.0), Shares(5.0, 5.0)),
        (10.0, 3.0, Shares(10.0, 3.0), Shares(7.0, 3.0)),
        (10.0, 9.0, Shares(10.0, 5.0), Shares(5.0, 5.0)),
    ],
)
def test_both_together_are_within_what_the_owner_lets_it_send(
    upload: float, rate: float, idle: Shares, busy: Shares
) -> None:
    share = RelayShare(rate)
    assert share.divide(upload, 0, 100.0) == idle
    assert share.divide(upload, 1, 101.0) == busy
    assert share.divide(upload, 1, 101.0 + BUSY_SECONDS / 2) == busy
    assert share.divide(upload, 1, 101.0 + BUSY_SECONDS) == idle
    assert not upload or busy.exchange + busy.relay <= upload
