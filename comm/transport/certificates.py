"""A process's own certificate: P-256, made once, kept in its state directory, known to others by its pin.

Nobody signs it, and no name or date in it says anything: whoever dials knows the pin, the SHA-256 of the
certificate, from the join URL (the coordinator's) or from the coordinator (a node's), and trusts that one alone.
"""

import base64
import hashlib
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import atomic_write, write_all
from atoll.comm.ids import Pin
from atoll.comm.signatures import PrivateKey

FILE = "tls.pem"  # in the state directory
NAME = "atoll"  # subject and host name in every certificate
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n.+?-----END \1-----\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A private key and its self-signed certificate."""

    path: Path  # of the file with both
    key: bytes = field(repr=False)  # PEM
    body: bytes = field(repr=False)  # PEM

    @property
    def pin(self) -> Pin:
        """The pin by which others know the certificate: see `pin_of`."""
        return pin_of(self.der)

    @property
    def der(self) -> bytes:
        """The certificate as it is shown."""
        return ssl.PEM_cert_to_DER_cert(self.body.decode())

    def signing_key(self) -> PrivateKey:
        """The certificate's key, to sign with. Raises `ConfigError` if it is none that this software makes."""
        try:
            return PrivateKey.load(self.key)
        except ValueError as error:
            raise ConfigError(f"{self.path}: {error}; delete the file: another one is made") from None


def pin_of(der: bytes) -> Pin:
    """The SHA-256 of a certificate (DER), in lower-case base32 without padding."""
    return Pin(base64.b32encode(hashlib.sha256(der).digest()).decode().rstrip("=").lower())


def load_or_make(state_dir: Path) -> Certificate:
    """The certificate in this directory, made now if there is none. One process at a time may call this.

    `ConfigError` if the file is none of ours, `ResourceError` if it cannot be read or written.
    """
    path = state_dir / FILE
    try:
        if not path.exists():
            _write(path, _make())
        return _load(path)
    except OSError as error:
        raise ResourceError(f"cannot use {path}: {error.strerror}") from None


def _load(path: Path) -> Certificate:
    text = path.read_bytes()
    blocks = {match[1]: match[0] for match in _BLOCK.finditer(text)}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, password=lambda: "")
        return Certificate(path, blocks[b"PRIVATE KEY"], blocks[b"CERTIFICATE"])
    except (ssl.SSLError, KeyError) as error:
        why = getattr(error, "reason", None) or "a part is missing"
    raise ConfigError(
        f"{path} does not hold a private key and its certificate ({why.lower().replace('_', ' ')}): put the file "
        "back. Or delete it: another one is made, and join URLs made before are good for nothing"
    )


def _make() -> bytes:
    """A fresh key and its certificate, PEM."""
    from datetime import datetime  # the library is loaded once in the life of a state directory

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))  # a machine's clock may be wrong
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280: no end
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    body = builder.sign(key, SHA256()).public_bytes(Encoding.PEM)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + body


def _write(path: Path, data: bytes) -> None:
    """The file appears whole or not at all, and is its owner's alone from the start."""
    with atomic_write(path, None) as file:
        write_all(file, [memoryview(data)], 0)
