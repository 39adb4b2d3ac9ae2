"""Signatures: of these parts, by this key, and of nothing else."""

import subprocess
import sys

import pytest

from atoll.comm.ids import NO_KEY, PublicKey
from atoll.comm.signatures import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, PrivateKey, is_public_key, sign, verify

KEY, ANOTHER = PrivateKey.generate(), PrivateKey.generate()
PARTS = (b"a test", b"run", b"7")


def test_a_signature_is_of_its_parts_and_its_key_alone() -> None:
    signature = sign(KEY, *PARTS)
    assert len(signature) == SIGNATURE_BYTES and len(KEY.public) == PUBLIC_KEY_BYTES
    assert verify(KEY.public, signature, *PARTS)
    assert not verify(ANOTHER.public, signature, *PARTS)
    for other in ((b"a test", b"run", b"8"), (b"a test", b"run7", b""), (b"a testrun", b"7"), PARTS[:2], ()):
        assert not verify(KEY.public, signature, *other)
    for at in (0, 31, 32, 63):
        changed = bytearray(signature)
        changed[at] ^= 1
        assert not verify(KEY.public, bytes(changed), *PARTS)


@pytest.mark.parametrize("signature", [b"", bytes(64), b"\xff" * 64, bytes(63), bytes(65)])
def test_what_is_no_signature_verifies_nothing(signature: bytes) -> None:
    assert not verify(KEY.public, signature, *PARTS)


@pytest.mark.parametrize(
    "key",
    [NO_KEY, bytes(33), b"\x02" + b"\xff" * 32, KEY.public[:32], KEY.public + b"\0"],
    ids=["none", "zeros", "no point", "cut short", "too long"],
)
def test_what_is_no_key_verifies_nothing(key: bytes) -> None:
    assert not is_public_key(key) and is_public_key(KEY.public)
    assert not verify(PublicKey(key), sign(KEY, *PARTS), *PARTS)


def test_a_signature_is_of_the_standard_s_form() -> None:
    """Anybody's ECDSA verifies it, over the parts with their lengths before them."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
    from cryptography.hazmat.primitives.hashes import SHA256

    message = b"".join(len(part).to_bytes(8, "little") + part for part in PARTS)
    signature = sign(KEY, *PARTS)
    der = encode_dss_signature(*(int.from_bytes(half, "big") for half in (signature[:32], signature[32:])))
    point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), KEY.public)
    point.verify(der, message, ec.ECDSA(SHA256()))


def test_a_key_of_another_kind_is_refused() -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data in (pem, b"no key"):
        with pytest.raises(ValueError):
            PrivateKey.load(data)


def test_the_library_is_loaded_by_the_first_key_alone() -> None:
    probe = "import sys, atoll.comm.signatures; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", probe], timeout=60).returncode == 0
