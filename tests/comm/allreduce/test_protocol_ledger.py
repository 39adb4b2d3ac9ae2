"""Chunks that are not what the ledger says: given up, asked for elsewhere, and who gave them is named."""

from dataclasses import replace

from reduce_plans import A, B, C, D, begun, plan_of, sends

from atoll.comm.allreduce.effects import FreeSealed, ReportComplete, ReportForged, ReportMissing, SendFrame
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.digest import root
from atoll.comm.transport.frames import FrameKind


def test_a_chunk_that_is_not_the_ledgers_is_given_up_and_asked_for_elsewhere_and_who_gave_it_is_named() -> None:
    x = begun(A, [1, 2])
    x.sealed_arrived(0, b"right", B)
    assert x.sealed_arrived(1, b"forged", C)[-1] == ReportComplete(root([b"right", b"forged"]))
    forget, forged, ask = x.prove([b"right", b"as sealed"])
    assert (forget, forged) == (FreeSealed(1), ReportForged(1, C))
    assert isinstance(ask, SendFrame) and ask.kind is FrameKind.WANT and ask.node in (B, D)
    assert x.prove([b"right", b"as sealed"]) == [], "it is told once"
    again = x.sealed_arrived(1, b"forged", ask.node)
    assert again[0] == ReportForged(1, ask.node)
    assert x.digests == [b"right", None] and [n != ask.node for n, _ in sends(again, FrameKind.WANT)] == [True]
    assert x.sealed_arrived(1, b"as sealed", B)[-1] == ReportComplete(root([b"right", b"as sealed"]), proven=True)


def test_that_what_is_here_is_the_ledgers_is_said_again() -> None:
    x = begun(A, [1])
    x.sealed_arrived(0, b"right", B)
    assert x.prove([b"right"]) == [ReportComplete(root([b"right"]), proven=True)]


def test_what_was_told_of_a_chunk_is_void_once_that_is_reduced_anew() -> None:
    x = begun(A, [1])
    x.prove([b"right"])
    x.replan(plan_of(2, [2], gone="b", since=(2,)))
    assert x.sealed_arrived(0, b"another", C)[-1] == ReportComplete(root([b"another"]))


def test_a_chunk_that_nobody_had_right_is_asked_for_again_under_the_next_plan() -> None:
    x = begun(A, [1])
    x.sealed_arrived(0, b"forged", B)
    asked = [node for node, _ in sends(x.prove([b"right"]), FrameKind.WANT)]
    while found := sends(x.sealed_arrived(0, b"forged", asked[-1]), FrameKind.WANT):
        asked.append(found[0][0])
    assert sorted(asked) == [B, C, D] and asked[0] != B
    assert x.sealed_arrived(0, b"forged", B) == [ReportForged(0, B)], "that it is lacking was said"
    out = x.replan(plan_of(2, [1], since=(1,)))
    assert len(sends(out, FrameKind.WANT)) == 1


def test_what_everybody_was_asked_for_in_vain_is_said_to_be_lacking_once_nothing_else_is_missing() -> None:
    x = begun(A, [1, 2])
    x.sealed_arrived(0, b"forged", B)
    x.sealed_arrived(1, b"forged too", C)
    out = x.prove([b"right", b"as sealed"])
    asked = {c: [n for n, chunk in sends(out, FrameKind.WANT) if chunk == c] for c in range(2)}
    while found := sends(out := x.chunk_lacked(asked[0][-1], 0), FrameKind.WANT):
        asked[0].append(found[0][0])
    assert out == [], "the other chunk may still come"
    while found := sends(out := x.sealed_arrived(1, b"forged too", asked[1][-1]), FrameKind.WANT):
        asked[1].append(found[0][0])
    assert out == [ReportForged(1, asked[1][-1]), ReportMissing((0, 1))]
    assert sorted(asked[0]) == sorted(asked[1]) == [B, C, D]
    assert x.sealed_arrived(1, b"as sealed", C)[-1] == ReportMissing((0,)), "late, it is here after all"
    assert x.sealed_arrived(0, b"right", C)[-1] == ReportComplete(root([b"right", b"as sealed"]), proven=True)


def test_an_owner_that_sealed_what_it_does_not_have_says_so() -> None:
    x = begun(B, [1])
    for node in (A, C, D):
        x.contribution_arrived(node, 0)
    x.chunk_merged(0, 1, range(4), b"as sent")
    asked = [node for node, _ in sends(x.prove([b"as sealed"]), FrameKind.WANT)]
    while found := sends(out := x.sealed_arrived(0, b"as sent", asked[-1]), FrameKind.WANT):
        asked.append(found[0][0])
    assert sorted(asked) == [A, C, D] and out[-1] == ReportMissing((0,))


def test_who_gave_a_chunk_before_it_was_reopened_is_not_blamed_for_what_is_sealed_after() -> None:
    x = begun(A, [1])
    x.sealed_arrived(0, b"void", B)
    x.replan(plan_of(2, [0], since=(2,)))
    for node in (B, C, D):
        x.contribution_arrived(node, 0)
    x.chunk_merged(0, 2, range(4), b"as sent")
    assert not [e for e in x.prove([b"as sealed"]) if isinstance(e, ReportForged)]


def test_who_is_told_what_it_still_waits_for_asks_for_it_or_says_that_nobody_has_it() -> None:
    x = begun(A, [1])
    asked = [sends(x.pull(0), FrameKind.WANT)[0][0]]
    while found := sends(x.chunk_lacked(asked[-1], 0), FrameKind.WANT):
        asked.append(found[0][0])
    assert x.prove([b"as sealed"]) == [ReportMissing((0,))], "all have said that they do not have it"
    y = begun(A, [1])
    assert len(sends(y.prove([b"as sealed"]), FrameKind.WANT)) == 1


def test_who_has_nobody_to_ask_lacks_the_chunk_at_once() -> None:
    x = ReduceProtocol(A, 1, 1)
    plan = plan_of(1, [0])
    leaves = tuple(replace(m, leaf=m.node != A) for m in plan.members)
    x.replan(replace(plan, members=leaves))
    for node in (B, C, D):
        x.contribution_arrived(node, 0)
    x.chunk_merged(0, 1, range(4), b"as sent")
    assert x.prove([b"as sealed"]) == [FreeSealed(0), ReportMissing((0,))]
    assert x.replan(replace(plan_of(2, [0], since=(1,)), members=leaves)) == [ReportMissing((0,))]
