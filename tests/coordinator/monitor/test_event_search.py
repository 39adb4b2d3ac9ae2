"""Events are found by time and words, page by page, each once."""

from collections.abc import Iterator

import pytest

from atoll.comm.ids import NodeId
from atoll.coordinator.monitor import event_search
from atoll.coordinator.monitor.event_search import found_events, round_of
from atoll.coordinator.state_machine.events import Note

NOTES = [
    (float(k // 3), Note(f"{'Ada' if k % 2 else 'bo'} did {k}", NodeId("n7") if k % 5 == 0 else None))
    for k in range(300)
]


def newest_first(before: float = 1e9) -> Iterator[tuple[float, Note]]:
    return (note for note in reversed(NOTES) if note[0] < before)


@pytest.mark.parametrize("limit", [1, 4, 50])
def test_page_by_page_every_event_comes_once(limit: int) -> None:
    got, before = list[str](), 1e9
    while True:
        said = found_events(newest_first(before), limit=limit)
        got += [event["sentence"] for event in said["events"]]
        if said["before"] is None:
            break
        before = said["before"]
    assert got == [note.sentence for _, note in reversed(NOTES)]


def test_all_words_are_looked_for_in_sentence_and_node_whatever_their_case() -> None:
    found = found_events(newest_first(), "ADA n7", limit=500)["events"]
    assert [event["sentence"] for event in found] == [
        n.sentence for _, n in reversed(NOTES) if n.node and "Ada" in n.sentence
    ]


def test_times_bound_what_is_found() -> None:
    said = found_events(newest_first(50.0), after=40.0, limit=500)
    assert {event["at"] for event in said["events"]} == set(map(float, range(40, 50))) and said["before"] is None


def test_a_long_search_ends_early_and_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_search, "MAX_LOOKED_AT", 20)
    before, got, asks = 1e9, list[str](), 0
    while before is not None:
        said = found_events(newest_first(before), "bo did")
        got, before, asks = got + [e["sentence"] for e in said["events"]], said["before"], asks + 1
    assert asks > 10 and got == [n.sentence for _, n in reversed(NOTES) if "bo did" in n.sentence]


def test_no_notes_are_no_events() -> None:
    assert found_events(iter([]), "q") == {"events": [], "before": None}


def test_what_is_noted_of_any_round_is_found_by_who_asks_for_it() -> None:
    said = (
        "round 7 closes: ada contributes the steps that it has",
        "round 7 goes on without ada: it is silent",
        "ada joined",
    )
    notes = [(float(k), Note(sentence)) for k, sentence in enumerate(said)][::-1]
    assert [e["sentence"] for e in found_events(iter(notes))["events"]] == [said[2], said[1]]
    assert [e["sentence"] for e in found_events(iter(notes), "round 7")["events"]] == [said[1]]
    assert [e["sentence"] for e in found_events(iter(notes), routine=True)["events"]] == list(said[::-1])


def test_the_round_that_a_note_is_about_is_said_by_it_or_its_first_words() -> None:
    assert round_of(Note("ada failed", round=3)) == round_of(Note("round 3 took 9 s")) == 3
    assert round_of(Note("ada is active from round 3 on")) == round_of(Note("rounds 3")) == 0
