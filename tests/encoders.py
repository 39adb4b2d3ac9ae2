"""A delta, encoded at once, for tests whose event loop runs already, or does not yet."""

from collections.abc import Callable
from contextlib import suppress

from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector


def at_once(encoder: DeltaEncoder) -> EncodedVector:
    async def here(work: Callable[[], None]) -> None:
        work()

    with suppress(StopIteration):  # it waits for nothing
        encoder.run(here).send(None)
    return encoder.encoded
