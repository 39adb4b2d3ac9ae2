"""What the node's machine has the trainer go on from, where fragments take turns."""

from dataclasses import dataclass, field

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import state_machine
from atoll.node.state_machine import Apply, Effect, Event, Recover, Train


@dataclass
class Story:
    """A node of two fragments, whose coordinator gives it ten samples a round."""

    node: state_machine.Node = field(default_factory=lambda: state_machine.Node(in_turns=True))
    version: int = 0
    reported: list[state_machine.ReportReady] = field(default_factory=list)

    def feed(self, event: Event) -> list[Effect]:
        self.node, effects = state_machine.step(self.node, event)
        self.reported += [e for e in effects if isinstance(e, state_machine.ReportReady)]
        return effects

    def view(self, committed: int, first: int, **more: object) -> list[Effect]:
        self.version += 1
        order = pb.Train(round=committed + 1, steps=5, floor=1, ceiling=9, lease=[pb.Range(first=first, count=40)])
        view = pb.View(version=self.version, committed=committed, you="active", phase="inner", has_state=True)
        view.state_digest = b"state %d" % committed
        view.donors.add(node_id="n2")
        view.train.CopyFrom(order)
        for key, value in more.items():
            setattr(view, key, value)
        return self.feed(state_machine.ViewArrived(view))

    def begin(self) -> None:
        """It has state 0, and trains on samples from 0 on."""
        self.feed(state_machine.TrainerUp())
        self.feed(state_machine.StateMoved(0, b"state 0"))
        (train,) = self.view(0, 0)
        assert isinstance(train, Train) and not (train.carried or train.on or train.kept)

    def ready(self, round_: int, ahead: bool) -> None:
        self.feed(state_machine.TrainerReady(round_, 5, 10, 2.0, 1.0, ahead))

    def reduced(self, round_: int) -> None:
        """It has every sealed chunk."""
        self.version += 1
        view = pb.View(version=self.version, committed=round_ - 1, you="active", phase="reducing")
        view.plan.round, view.plan.attempt = round_, 1
        self.feed(state_machine.ViewArrived(view))
        self.feed(state_machine.ReduceHeld((round_, 1), b"root %d" % round_))

    def trains(self, effects: list[Effect]) -> Train:
        (train,) = [e for e in effects if isinstance(e, Train)]
        return train


def test_after_a_commit_a_trainer_that_waited_starts_from_the_local_vector() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=False)
    assert story.node.ready is not None and story.node.ready.fresh
    story.reduced(1)
    (apply,) = story.view(1, 10, sealed=b"root 1")
    assert isinstance(apply, Apply)
    train = story.trains(story.feed(state_machine.StateMoved(1, b"state 1")))
    assert train.kept and not (train.carried or train.on or train.rebased)
    story.ready(2, ahead=False)
    assert story.node.ready is not None and not story.node.ready.fresh


def test_a_trainer_that_went_ahead_is_told_whether_later_rounds_were_missed() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=True)
    story.reduced(1)
    story.view(1, 10, sealed=b"root 1")
    story.version += 1
    later = pb.View(version=story.version, committed=2, you="active", phase="inner", has_state=True)
    later.state_digest, later.sealed = b"state 2", b"root 2"
    later.donors.add(node_id="n2")
    later.train.CopyFrom(pb.Train(round=3, steps=5, ceiling=9, lease=[pb.Range(first=10, count=40)]))
    story.feed(state_machine.ViewArrived(later))
    (_, recover) = story.feed(state_machine.StateMoved(1, b"state 1"))
    assert isinstance(recover, Recover) and recover.rebase, "the other fragments' steps come along"
    train = story.trains(story.feed(state_machine.StateMoved(2, b"state 2")))
    assert train.on and train.rebased and not train.carried
    story.ready(3, ahead=True)
    story.reduced(3)
    story.view(3, 20, sealed=b"root 3")
    train = story.trains(story.feed(state_machine.StateMoved(3, b"state 3")))
    assert train.on and not (train.rebased or train.carried)


def test_nothing_is_kept_of_a_vector_that_a_trainer_may_have_died_over() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=False)
    story.reduced(1)
    story.view(1, 10, sealed=b"root 1")
    assert story.trains(story.feed(state_machine.StateMoved(1, b"state 1"))).kept
    story.feed(state_machine.TrainerDown())
    train = story.trains(story.feed(state_machine.TrainerUp()))
    assert not (train.kept or train.carried)
    story.ready(2, ahead=False)
    assert story.node.ready is not None and story.node.ready.fresh


def test_work_that_waits_to_be_reported_is_not_once_the_node_has_dropped_it() -> None:
    story = Story(state_machine.Node())
    story.begin()
    story.ready(1, ahead=False)
    work = story.node.ready
    assert work is not None and state_machine.still_ready(story.node, work)
    (recover,) = [
        e for e in story.view(0, 0, you="recovering", state_digest=b"the run's") if isinstance(e, Recover)
    ]
    assert recover.differs and not state_machine.still_ready(story.node, work)
    story.feed(state_machine.StateMoved(0, b"the run's"))
    story.view(0, 0, state_digest=b"the run's")
    story.feed(state_machine.TrainerReady(1, 5, 20, 2.0, 1.0))
    assert story.node.ready is not None and not state_machine.still_ready(story.node, work)


def test_steps_from_a_state_that_may_not_be_the_runs_are_not_reported() -> None:
    """The report could come late, and be taken for one of the steps from the right state."""
    story = Story()
    story.begin()
    story.feed(state_machine.Rejoined())
    story.view(0, 0, you="joining", state_digest=b"another")
    story.ready(1, ahead=False)
    assert story.node.ready is not None and not story.reported
    story.view(0, 0)
    assert [r.ready.samples for r in story.reported] == [10]


def test_what_was_held_when_the_session_ended_is_applied_if_it_was_committed() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=False)
    story.reduced(1)
    story.feed(state_machine.Rejoined())
    (apply,) = story.view(1, 10, sealed=b"root 1", you="synced")
    assert isinstance(apply, Apply)


def test_who_holds_the_runs_state_by_an_older_number_gives_it_the_newer_one_and_fetches_nothing() -> None:
    story = Story()
    story.feed(state_machine.TrainerUp())
    story.feed(state_machine.StateMoved(1, b"state 1"))
    assert story.view(3, 0, state_digest=b"state 1") == [state_machine.Renumber(3)], "rounds 2 and 3 are void"
    assert story.trains(story.feed(state_machine.StateMoved(3, b"state 1"))).order.round == 4


def test_where_nobody_has_the_state_any_more_it_goes_back_once_to_what_its_disk_has() -> None:
    story = Story()
    story.feed(state_machine.TrainerUp())
    assert [type(effect) for effect in story.view(5, 0)] == [state_machine.Recover]
    gone = {"has_state": False, "you": "recovering"}
    assert story.view(5, 0, **gone) == story.feed(state_machine.MoveFailed(-1)) == [], "the others are applying it"
    assert story.view(5, 0, lost=True, **gone) == [state_machine.FallBack()]
    assert story.feed(state_machine.MoveFailed(-1)) == [], "its disk has nothing, either"
    assert story.view(5, 0, lost=True, **gone) == []
    assert [type(effect) for effect in story.view(5, 0, you="recovering")] == [state_machine.Recover]
    story.view(5, 0, lost=True, **gone)
    assert story.feed(state_machine.MoveFailed(-1)) == [state_machine.FallBack()]
    assert story.feed(state_machine.StateMoved(3, b"state 3")) == [state_machine.ReportState(3, b"state 3")]


def test_who_has_a_new_session_says_first_what_it_holds() -> None:
    story = Story()
    story.begin()
    said = story.feed(state_machine.Rejoined())
    assert said == [state_machine.ReportState(0, b"state 0"), state_machine.ReportLayout()]
    story.view(1, 10)
    story.feed(state_machine.TrainerReady(1, 5, 10, 2.0, 1.0))
    assert story.node.moving
    assert story.feed(state_machine.Rejoined()) == [state_machine.ReportLayout()], (
        "it has no state while that moves"
    )
