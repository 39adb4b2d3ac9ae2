"""What a leaf, which nobody can dial, offers over connections that it dialled itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from serving_planes import DEADLINE, KEY, NEW, NOISE, OLD, SEALED, ZEROS, A, B, Nothing, run, two_planes

from atoll.comm.digest import digest
from atoll.comm.ids import NO_PIN, NodeId
from atoll.comm.transport import leaf_relay
from atoll.comm.transport.connection import Link
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem, NotAvailable


@asynccontextmanager
async def offered(to: DataPlane, by: DataPlane) -> AsyncIterator[None]:
    """`by`, which nobody dials, answers what is asked at `to`."""
    by.offering.offer_to([(to.node, to.address, NO_PIN)])
    async with asyncio.timeout(DEADLINE):
        while len(to.offers._free) < leaf_relay.LINKS_PER_TARGET:
            await asyncio.sleep(0)
    yield
    by.offering.offer_to([])


def test_what_a_leaf_offers_is_fetched_where_it_dialled() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), offered(to=b, by=a):
            async with FetchClient(b, B, "") as fetcher:
                assert await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
                with pytest.raises(NotAvailable):
                    await fetcher.fetch(FetchItem.STATE, OLD, 0, len(NOISE))
                assert await fetcher.fetch(FetchItem.DIGESTS, NEW, 0, 32) == digest(NOISE) + digest(ZEROS)
            assert len(b.offers._free) == leaf_relay.LINKS_PER_TARGET  # it was given back

    run(body())


def test_a_node_passes_on_what_leaves_offer_it() -> None:
    async def body() -> None:
        c = NodeId("c")
        async with two_planes() as (a, b):
            third = await DataPlane.start("127.0.0.1:0", b.run, c, KEY, Nothing())
            async with offered(to=third, by=a), FetchClient(b, c, third.address) as fetcher:
                assert await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
                assert await fetcher.fetch(FetchItem.STATE, NEW, 1, len(ZEROS)) == ZEROS
                assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
                with pytest.raises(NotAvailable):
                    await fetcher.fetch(FetchItem.SEALED, OLD, 0, len(SEALED))
            await third.close()

    run(body())


def test_an_offer_that_broke_is_one_less_and_is_made_again() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), offered(to=b, by=a):
            for gone in list(b.offers._free):
                gone.link.close()
            with pytest.raises(DonorLost):
                await b.fetch(B, "", FetchItem.STATE, NEW, 0, len(NOISE))
            async with asyncio.timeout(DEADLINE):
                while True:
                    try:
                        assert await b.fetch(B, "", FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
                        break
                    except DonorLost:
                        await asyncio.sleep(0.01)

    run(body())


def test_of_one_leafs_connections_the_latest_are_kept() -> None:
    class Closes:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def body() -> None:
        kept, links = leaf_relay.OfferPool(), [Closes() for _ in range(leaf_relay.MAX_LINKS_PER_LEAF + 1)]
        keeping = [asyncio.create_task(kept.keep(A, cast(Link, link))) for link in links]
        await asyncio.sleep(0)
        assert [link.closed for link in links] == [True] + [False] * leaf_relay.MAX_LINKS_PER_LEAF
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)

    run(body())


def test_where_nobody_offers_anything_nothing_is_fetched() -> None:
    async def body() -> None:
        async with two_planes() as (_, b):
            with pytest.raises(DonorLost, match="no leaf has dialled this node yet"):
                await b.fetch(B, "", FetchItem.STATE, NEW, 0, len(NOISE))

    run(body())
