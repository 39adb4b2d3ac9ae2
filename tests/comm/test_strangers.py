"""Places for strangers are shared between addresses: what one does costs another one nothing."""

import pytest

from atoll.comm.rate_limits import RateLimit
from atoll.comm.strangers import StrangerLimits, Strangers, network_of


def strangers(places: int = 4, per_address: int = 2, burst: int = 100) -> Strangers[str]:
    return Strangers(StrangerLimits(places, per_address, RateLimit(1.0, burst)))


def test_an_address_displaces_its_own_oldest_and_no_others() -> None:
    here = strangers()
    assert here.admit("b1", "b", 0.0).displaced is None
    displaced = [here.admit(f"a{i}", "a", 0.0).displaced for i in range(50)]
    assert displaced == [None, None, *(f"a{i}" for i in range(48))]
    assert "b1" in here and len(here) == 3


def test_when_all_places_are_taken_the_address_with_the_most_loses_its_oldest() -> None:
    here = strangers(places=3, per_address=2)
    for name in ("b1", "a1", "a2"):
        assert here.admit(name, name[0], 0.0).displaced is None
    assert here.admit("c1", "c", 0.0).displaced == "a1"
    assert here.admit("d1", "d", 0.0).displaced == "b1"  # all have one: the oldest
    assert len(here) == 3


def test_who_proves_itself_pays_nothing_and_who_comes_in_vain_comes_seldom() -> None:
    here = strangers(burst=3)
    for _ in range(10):
        assert here.admit("a", "a", 0.0).admitted
        here.prove("a", 0.0)
    for _ in range(3):
        assert not here.exhausted("a", 0.0)
        assert here.admit("a", "a", 0.0).admitted
        here.leave("a")
    assert here.exhausted("a", 0.0) and not here.admit("a", "a", 0.0).admitted
    assert here.admit("b", "b", 0.0).admitted
    assert here.admit("a", "a", 1.0).admitted and not here.admit("a2", "a", 1.0).admitted
    assert here.admit("a3", "a", 1.0, charge=False).admitted


def test_nothing_is_kept_of_who_left() -> None:
    here = strangers()
    here.admit("a", "a", 0.0)
    assert here.leave("a") == "a" and here.leave("a") is None
    here.prove("a", 0.0)
    assert len(here) == 0 and here.count("a") == 0 and here.of("a") == ()


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::"),
        ("somewhere", "somewhere"),
    ],
)
def test_an_ipv6_address_stands_for_what_one_customer_has(host: str, network: str) -> None:
    assert network_of(host) == network
