import dataclasses
from dataclasses import dataclass, field

import pytest

from atoll.comm.replace import replace


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    size: int = 1
    parts: dict[str, int] = field(default_factory=dict)


def test_it_does_what_dataclasses_replace_does() -> None:
    record = Record("a", 2, {"x": 1})
    for changes in ({}, {"size": 3}, {"name": "b", "parts": {}}):
        changed = replace(record, **changes)
        assert changed == dataclasses.replace(record, **changes)
        assert type(changed) is Record and changed is not record
    assert record == Record("a", 2, {"x": 1}) and replace(record).parts is record.parts
    with pytest.raises(AttributeError):
        replace(record, length=1)  # type: ignore[call-arg]
