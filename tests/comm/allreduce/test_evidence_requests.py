"""What auditors ask over the links of a reduce: which answers are taken."""

import asyncio

from atoll.comm.allreduce.evidence_requests import EvidenceRequests
from atoll.comm.ids import NodeId
from atoll.comm.transport.frames import FrameKind, QueuedFrame


def test_answers_that_nobody_asked_for_and_those_of_another_length_are_not_taken() -> None:
    posted = list[tuple[NodeId, QueuedFrame]]()
    node = NodeId("n2")

    async def body() -> None:
        requests = EvidenceRequests(lambda node, queued: posted.append((node, queued)))
        assert requests.buffer_for(node, FrameKind.INPUT, 3, 100) is None
        asked = asyncio.create_task(requests.ask(node, FrameKind.GET_INPUT, 3, 100, exact=True))
        await asyncio.sleep(0)
        assert await requests.ask(node, FrameKind.GET_INPUT, 3, 100, exact=True) is None  # one at a time
        for wrong in ((node, FrameKind.INPUT, 3, 99), (node, FrameKind.RECEIPT, 3, 100)):
            assert requests.buffer_for(*wrong) is None
        assert requests.buffer_for(NodeId("n3"), FrameKind.INPUT, 3, 100) is None
        place = requests.buffer_for(node, FrameKind.INPUT, 3, 100)
        assert place is not None and place.size == 100 and not asked.done()
        requests.arrived(node, FrameKind.INPUT, 3, place)
        assert await asked is place
        receipt = asyncio.create_task(requests.ask(node, FrameKind.GET_RECEIPT, 3, 100, exact=False))
        await asyncio.sleep(0)
        assert requests.buffer_for(node, FrameKind.RECEIPT, 3, 101) is None
        assert (place := requests.buffer_for(node, FrameKind.RECEIPT, 3, 0)) is not None
        requests.arrived(node, FrameKind.RECEIPT, 3, place)
        assert await receipt is None
        over = asyncio.create_task(requests.ask(node, FrameKind.GET_INPUT, 4, 100, exact=True))
        await asyncio.sleep(0)
        requests.end()
        assert await over is None
        assert [queued[:2] for _, queued in posted] == [
            (FrameKind.GET_INPUT, 3),
            (FrameKind.GET_RECEIPT, 3),
            (FrameKind.GET_INPUT, 4),
        ]

    asyncio.run(body())
