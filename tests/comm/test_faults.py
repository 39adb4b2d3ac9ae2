"""Faults as data."""

import pytest

from atoll.comm import faults
from atoll.comm.faults import fault_point, parse


def test_a_point_can_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FAULTS", parse("somewhere=memory,elsewhere@2=memory"))
    fault_point("nowhere")
    fault_point("elsewhere")
    for point in ("somewhere", "somewhere", "elsewhere"):
        with pytest.raises(MemoryError, match=point):
            fault_point(point)
    fault_point("elsewhere")


@pytest.mark.parametrize("text", ["point", "point=", "point=explode"])
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ATOLL_FAULTS holds 'point"):
        parse(text)
