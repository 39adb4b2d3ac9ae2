"""What a trainer died of, by its last words, its exit code, and what the kernel counts."""

import pytest

from atoll.comm.incidents import IncidentKind
from atoll.node.daemon.memory_signs import cause_of_death, oom_kills

OOM, DIED = IncidentKind.OUT_OF_MEMORY, IncidentKind.TRAINER_DIED


@pytest.mark.parametrize(
    ("line", "code", "kills", "found"),
    [
        ("launch: rank 0 ended with signal SIGKILL", 1, 1, (OOM, -9)),
        ("launch: rank 0 ended with signal SIGKILL", 1, 0, (DIED, -9)),  # somebody killed it
        ("launch: rank 0 ended with signal SIGSEGV", 1, 1, (DIED, -11)),
        ("", -9, 1, (OOM, -9)),
        ("", 137, 2, (OOM, -9)),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", 1, 0, (OOM, 1)),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", 1, 0, (OOM, 1)),
        ("MemoryError", 1, 0, (OOM, 1)),
        ("terminate called after throwing an instance of 'std::bad_alloc'", 134, 0, (OOM, -6)),
        ("ValueError: the loss is not finite", 1, 3, (DIED, 1)),
        ("launch: rank 0 ended with signal SIGNONSENSE", 1, 1, (DIED, 1)),
    ],
)
def test_a_lack_of_memory_is_told_from_other_deaths(
    line: str, code: int, kills: int, found: tuple[IncidentKind, int]
) -> None:
    assert cause_of_death(line, code, kills) == found


def test_the_kernel_is_asked_where_it_counts() -> None:
    assert oom_kills() >= 0
