from dataclasses import dataclass, field

import pytest
from msgspec import Struct

from atoll.comm.replace import replace


@dataclass(frozen=True, slots=True)
class Plain:
    name: str
    size: int = 1
    parts: dict[str, int] = field(default_factory=dict)


class Packed(Struct, frozen=True):
    name: str
    size: int = 1
    parts: dict[str, int] = {}


@pytest.mark.parametrize("kind", [Plain, Packed])
def test_a_copy_has_the_changes_and_shares_the_rest(kind: type[Plain] | type[Packed]) -> None:
    record = kind("a", 2, {"x": 1})
    assert replace(record, size=3) == kind("a", 3, {"x": 1})
    assert replace(record, name="b", parts={}) == kind("b", 2)
    assert record == kind("a", 2, {"x": 1}) and replace(record).parts is record.parts
    with pytest.raises(TypeError):
        replace(record, length=1)  # type: ignore[call-arg]
