import asyncio

from atoll.comm.priority_lock import PriorityLock


def order(keys: list[int], give_up: int = -1) -> list[int]:
    """In which order they have their turn, the first one being inside when the others come."""

    async def story() -> list[int]:
        turns, had, leave = PriorityLock(), list[int](), asyncio.Event()

        async def one(i: int) -> None:
            async with turns.one(keys[i]):
                had.append(i)
                if i == 0:
                    await leave.wait()

        tasks = [asyncio.create_task(one(i)) for i in range(len(keys))]
        await asyncio.sleep(0)
        leave.set()
        if give_up >= 0:
            tasks[give_up].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.one(0):
            return had

    return asyncio.run(asyncio.wait_for(story(), 5))


def test_the_smallest_key_is_next_and_of_equal_ones_who_came_first() -> None:
    assert order([9, 3, 1, 3, 2]) == [0, 2, 4, 1, 3]


def test_who_gives_up_has_no_turn_and_takes_none_from_others() -> None:
    assert order([0, 5, 5, 5], give_up=2) == [0, 1, 3]
    assert order([0, 5, 5, 5], give_up=0) == [0, 1, 2, 3]
