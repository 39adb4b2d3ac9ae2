"""A process's certificate: made once, its owner's alone, known by its pin; and what may be wrong with its file."""

import hashlib
import ssl
import stat
from pathlib import Path

import pytest

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.ids import is_pin
from atoll.comm.signatures import sign, verify
from atoll.comm.transport.certificates import FILE, load_or_make, pin_of


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    first = load_or_make(tmp_path)
    assert load_or_make(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    (tmp_path / "another").mkdir()
    assert load_or_make(tmp_path / "another").pin != first.pin


def test_its_file_is_its_owners_alone_and_what_a_crash_left_is_not_used(tmp_path: Path) -> None:
    (tmp_path / (FILE + ".new")).write_text("half of a key")
    (tmp_path / (FILE + ".new")).chmod(0o644)
    certificate = load_or_make(tmp_path)
    assert stat.S_IMODE(certificate.path.stat().st_mode) == 0o600
    assert b"PRIVATE KEY" not in certificate.body and b"PRIVATE KEY" in certificate.key
    assert "PRIVATE" not in repr(certificate)


def test_the_pin_is_the_sha256_of_the_certificate(tmp_path: Path) -> None:
    certificate = load_or_make(tmp_path)
    der = ssl.PEM_cert_to_DER_cert(certificate.body.decode())
    assert certificate.pin == pin_of(der) and is_pin(certificate.pin)
    assert pin_of(b"").startswith(
        "4oymiquy7qobjgx36tejs35zeqt24qpemsnzgtfeswmrw6csxbkq"
    )  # of no bytes: e3b0c442...
    assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")
    assert not is_pin(certificate.pin[1:]) and not is_pin(certificate.pin.upper()) and not is_pin("")


def test_the_key_is_p256(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import load_pem_x509_certificate

    key = load_pem_x509_certificate(load_or_make(tmp_path).body).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)


def test_its_key_signs_what_the_certificate_s_public_key_verifies(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509 import load_pem_x509_certificate

    certificate = load_or_make(tmp_path)
    key = certificate.signing_key()
    shown = load_pem_x509_certificate(certificate.body).public_key()
    assert shown.public_bytes(Encoding.X962, PublicFormat.CompressedPoint) == key.public
    assert verify(key.public, sign(key, b"a test"), b"a test")


def test_what_is_no_key_with_its_certificate_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    mine, other = load_or_make(tmp_path), load_or_make(tmp_path / "another")
    bad = (b"", b"no PEM at all", mine.key, mine.body, mine.key + other.body, (mine.key + mine.body)[:-60])
    for data in bad:
        mine.path.write_bytes(data)
        with pytest.raises(
            ConfigError, match="does not hold a private key and its certificate .*delete it"
        ) as caught:
            load_or_make(tmp_path)
        assert str(mine.path) in str(caught.value)
        assert mine.path.read_bytes() == data, "it is left as it is"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(ResourceError, match=f"cannot use .*{FILE}: Is a directory"):
        load_or_make(tmp_path)
    with pytest.raises(ResourceError, match="cannot use .*: No such file"):
        load_or_make(tmp_path / "nowhere")
