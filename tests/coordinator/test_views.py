"""Who gets a view, and which one."""

import asyncio

from scenario import CONFIG

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator import view
from atoll.coordinator.state import State
from atoll.coordinator.views import Stream

ADA = NodeId("n1")


def test_a_slow_reader_gets_the_latest_view_and_none_of_those_in_between() -> None:
    async def story() -> list[int]:
        common, stream = view.shared(State(CONFIG)), Stream(ADA, 1)
        mine = view.own(State(CONFIG), common, ADA)
        views = stream.views()
        versions = []
        for latest in (3, 7):
            for version in range(latest - 2, latest + 1):
                stream.show(common, mine, version)
            versions.append(pb.View.FromString(await anext(views)).version)
        stream.show(common, mine, 9)
        stream.end()
        return [*versions, *[pb.View.FromString(raw).version async for raw in views]]

    assert asyncio.run(story()) == [3, 7, 9]
