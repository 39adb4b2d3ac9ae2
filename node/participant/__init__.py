"""The door between a node and any training loop: `from atoll.node.participant import participate`."""

from atoll.node.participant.participant import Participant, participate

__all__ = ["Participant", "participate"]
