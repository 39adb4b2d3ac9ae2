import asyncio

from atoll.comm.transport.priority_lock import PriorityLock

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine


def order(keys: list[int], give_up: int = -1) -> list[int]:
    """In which order they have their turn, the first one being inside when the others come."""

    async def story() -> list[int]:
        turns, had, leave = PriorityLock(), list[int](), asyncio.Event()

        async def one(i: int) -> None:
            async with turns.one(keys[i], 5):
                had.append(i)
                if i == 0:
                    await leave.wait()

        tasks = [asyncio.create_task(one(i)) for i in range(len(keys))]
        await asyncio.sleep(0)
        leave.set()
        if give_up >= 0:
            tasks[give_up].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.one(0, 5):
            return had

    return asyncio.run(asyncio.wait_for(story(), DEADLINE))


def test_the_smallest_key_is_next_and_of_equal_ones_who_came_first() -> None:
    assert order([9, 3, 1, 3, 2]) == [0, 2, 4, 1, 3]


def test_who_gives_up_has_no_turn_and_takes_none_from_others() -> None:
    assert order([0, 5, 5, 5], give_up=2) == [0, 1, 3]
    assert order([0, 5, 5, 5], give_up=0) == [0, 1, 2, 3]


def test_who_takes_too_long_lets_the_next_one_in_and_gives_no_second_turn_away() -> None:
    async def story() -> list[str]:
        turns, had, stuck, inside = PriorityLock(), list[str](), asyncio.Event(), asyncio.Event()

        async def one(name: str, key: int, until: asyncio.Event, most: float) -> None:
            async with turns.one(key, most):
                had.append(name)
                if name == "second":
                    inside.set()
                await until.wait()

        leave = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(one("stuck", 0, stuck, 0.0))
            group.create_task(one("second", 1, leave, 5))
            group.create_task(one("third", 2, leave, 5))
            await inside.wait()
            stuck.set()  # its end is not the second one's
            for _ in range(5):
                await asyncio.sleep(0)
            had.append("the second is inside alone")
            leave.set()
        return had

    told = asyncio.run(asyncio.wait_for(story(), DEADLINE))
    assert told == ["stuck", "second", "the second is inside alone", "third"]
