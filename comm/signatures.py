"""Signatures by the long-lived key of a node: ECDSA on P-256 over SHA-256 (FIPS 186-5, SEC 1).

A node signs what others are to hold it to (its join, its hellos, its contributions); whoever has its public key
from the coordinator verifies that. What is signed is a sequence of parts, each with its length before it, so that
no two sequences have the same bytes; the first part says what the signature is for, so that it is good for nothing
else.

The library is loaded with the first key: 26 ms. Then a signature takes 22 microseconds to make and 65 to verify.
"""

from functools import cache, lru_cache
from typing import TYPE_CHECKING

from atoll.comm.ids import PublicKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

PUBLIC_KEY_BYTES = 33  # a compressed point (SEC 1, section 2.3.3)
SIGNATURE_BYTES = 64  # r, then s: 32 bytes each, big-endian
MAX_KEYS_AT_HAND = 4096  # public keys whose points are remembered: finding one takes 20 microseconds


class PrivateKey:
    """The secret half of a node's key."""

    def __init__(self, key: "EllipticCurvePrivateKey") -> None:
        self._key = key
        self.public = _compressed(key.public_key())

    @staticmethod
    def generate() -> "PrivateKey":
        """A fresh key."""
        from cryptography.hazmat.primitives.asymmetric import ec

        return PrivateKey(ec.generate_private_key(ec.SECP256R1()))

    @staticmethod
    def load(pem: bytes) -> "PrivateKey":
        """The key in `pem` (PKCS 8, not encrypted). Raises `ValueError` if there is none on this curve."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key = load_pem_private_key(pem, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("the key is not one of the curve P-256")
        return PrivateKey(key)

    def sign(self, message: bytes) -> bytes:
        """The signature of these bytes as they are: (SIGNATURE_BYTES,)."""
        from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

        r, s = decode_dss_signature(self._key.sign(message, _algorithm()))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def sign(key: PrivateKey, *parts: bytes) -> bytes:
    """The signature of the parts by this key, of `SIGNATURE_BYTES` bytes; the first part says what it is for."""
    return key.sign(_message(parts))


def verify(public: PublicKey, signature: bytes, *parts: bytes) -> bool:
    """Whether the signature is of these parts, by the owner of this public key. Of a key or a signature that is
    none it is not."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    if len(signature) != SIGNATURE_BYTES:
        return False
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    try:
        _point(public).verify(encode_dss_signature(r, s), _message(parts), _algorithm())
    except (InvalidSignature, ValueError):
        return False
    return True


def is_public_key(data: bytes) -> bool:
    """Whether these bytes are a compressed point of the curve."""
    try:
        _point(PublicKey(data))
    except ValueError:
        return False
    return True


def _message(parts: tuple[bytes, ...]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@cache
def _algorithm():  # type: ignore[no-untyped-def]
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    return ECDSA(SHA256())


@lru_cache(MAX_KEYS_AT_HAND)
def _point(public: PublicKey) -> "EllipticCurvePublicKey":
    """The point; `ValueError` if the bytes are none, or not a compressed one: a key has one form."""
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(public) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key has {PUBLIC_KEY_BYTES} bytes")
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), public)


def _compressed(key: "EllipticCurvePublicKey") -> PublicKey:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return PublicKey(key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint))
