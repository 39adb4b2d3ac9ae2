"""The proof in a request to join: that whoever asks has the key under which it wants to be known.

Signed is all that the request says of the node, and the session's secret, which nobody else knows: so a proof that
somebody saw brings nobody else in, and no field of it can be exchanged.
"""

from atoll.comm.ids import PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.signatures import PrivateKey, sign, verify

PURPOSE = b"atoll join"


def prove_join(request: pb.JoinRequest, key: PrivateKey) -> None:
    """Fill in the request's key, and its proof, which covers the other fields as they are now."""
    request.key = key.public
    request.proof = sign(key, *_parts(request))


def is_proven(request: pb.JoinRequest) -> bool:
    """Whether the request is by the owner of the key that it names."""
    return verify(PublicKey(request.key), request.proof, *_parts(request))


def _parts(request: pb.JoinRequest) -> list[bytes]:
    """What the request says of the node; the token, which is no part of it, stays exchangeable."""
    secret = request.session.partition(".")[0]  # the life behind it is the coordinator's to count
    texts = (request.run, request.name, request.address, request.role, request.pin, secret)
    return [PURPOSE, *(text.encode() for text in texts), bytes([request.leaf]), request.key]
