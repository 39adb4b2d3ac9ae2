"""An encrypted run of real processes: it commits, outlives its coordinator, and tells strangers nothing."""

import socket
import stat
import subprocess

import pytest
from e2e.harness import ATOLL, Run, until

from atoll.comm.ids import Pin
from atoll.comm.invite import Invite, parse

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def overheard(port: int, said: bytes) -> bytes:
    """What a stranger with a plain socket reads there."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        heard = b""
        try:
            while data := stranger.recv(1 << 16):
                heard += data
        except ConnectionError:
            pass
        return heard


def refused(run: Run, url: object) -> str:
    """What a node is told that is not let in."""
    where = ("--state-dir", str(run.folder / "refused"), "--listen", "127.0.0.1:0")
    done = subprocess.run([*ATOLL, "node", "join", str(url), *where], capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def without_pin(invite: Invite) -> Invite:
    return Invite(invite.address, invite.run, invite.token)


def with_pin_of(invite: Invite, other: Invite) -> Invite:
    return Invite(invite.address, invite.run, invite.token, other.pin)


def test_an_encrypted_run_commits_outlives_its_coordinators_death_and_tells_strangers_nothing(run: Run) -> None:
    run.start("security.tls=on")
    url = run.invite(3)
    for name in ("one", "two", "three"):
        run.join(url, name)
    until("a commit by three", lambda: run.contributors() == 3)

    ports = [int(m["address"].rpartition(":")[2]) for m in run.run()["members"]]
    invite = parse(url)
    for port in (*ports, int(invite.address.rpartition(":")[2])):
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            heard = overheard(port, said)
            assert b"ATOL" not in heard and len(heard) <= 7, "an alert at most"
    for key in (run.folder / who / "tls.pem" for who in ("c", "one", "two", "three")):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600

    committed = run.committed()
    run.coordinator.kill()
    run.coordinator.wait()
    run.restart()
    until("it is back", lambda: run.committed() >= committed)
    run.commit_after(run.committed() + 1)
    until("a commit by three", lambda: run.contributors() == 3)
    assert parse(run.invite(1)).pin == invite.pin
    run.whole(run.committed() - 1)
    assert all("certificate" not in run.log(name) for name in ("one", "two", "three"))


@pytest.mark.chaos
def test_a_url_and_a_coordinator_that_do_not_fit_are_told_apart(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = Run(tmp_path_factory.mktemp("plain"))
    try:
        run.start("security.tls=on")
        plain.start("security.tls=off")
        mine, other = parse(run.invite(1)), parse(plain.invite(1))
        assert mine.pin and not other.pin
        assert "speaks TLS and the join URL has no pin" in refused(run, without_pin(mine))
        assert "does not speak TLS and the join URL has a pin" in refused(run, with_pin_of(other, mine))
        wrong = Invite(mine.address, mine.run, mine.token, Pin("a" * 52))
        assert "shows another certificate than the join URL's" in refused(run, wrong)
        key = run.folder / "refused" / "tls.pem"
        key.write_text("not a key")
        where = ("--state-dir", str(key.parent), "--listen", "127.0.0.1:0")
        command = [*ATOLL, "node", "join", str(mine), *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and f"{key} does not hold a private key" in done.stderr
    finally:
        plain.stop()
