"""TLS sessions of the data plane: whoever dials knows which certificate the other side must show.

The accepting side asks for none: what a dialling node has to prove it proves with the run's key, inside the
session (`frames`). TLS 1.3 alone: a fresh key exchange for each connection, AES-GCM or ChaCha20, no renegotiation;
and no tickets, because nobody resumes.
"""

import ssl

from atoll.comm.ids import Pin
from atoll.comm.transport.certificates import Certificate, pin_of
from atoll.comm.transport.connection import Link, LinkBroken


class TlsContexts:
    """The TLS sessions of one process, which shows `certificate`."""

    def __init__(self, certificate: Certificate) -> None:
        self.pin = certificate.pin
        self._accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._accepting.load_cert_chain(certificate.path)
        self._accepting.num_tickets = 0
        self._dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._dialling.check_hostname = False
        self._dialling.verify_mode = ssl.CERT_NONE  # `dial` compares the pin; the session proves the key
        for context in (self._accepting, self._dialling):
            context.minimum_version = ssl.TLSVersion.TLSv1_3

    async def accept(self, link: Link, timeout: float) -> None:
        """Go over to TLS on a link that was accepted, within `timeout` seconds; `LinkBroken` if the other side
        does not speak it."""
        await link.secure(self._accepting, True, timeout)

    async def dial(self, link: Link, pin: Pin, timeout: float) -> None:
        """Go over to TLS on a link that was dialled, within `timeout` seconds; `LinkBroken` unless the other side
        shows the certificate with this pin, and has its key."""
        if not pin:
            raise LinkBroken("the coordinator named no certificate of it, and this run is encrypted")
        shown = await link.secure(self._dialling, False, timeout)
        if pin_of(shown) != pin:
            raise LinkBroken(
                "it shows another certificate than the coordinator has of it: somebody is in between, or another "
                "machine has its address now"
            )
