"""What the node's machine has the trainer go on from where fragments take turns, and what it says of itself."""

from dataclasses import dataclass, field

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.state_machine.effects import (
    Apply,
    Effect,
    Encode,
    FallBack,
    OrderTraining,
    Recover,
    Renumber,
    ReportLayout,
    ReportReady,
    ReportState,
)
from atoll.node.state_machine.events import (
    AttemptComplete,
    EncodingBegun,
    Event,
    MoveFailed,
    Rejoined,
    StateMoved,
    TrainerDown,
    TrainerUp,
    ViewArrived,
)
from atoll.node.state_machine.state import Moving, State
from atoll.node.state_machine.step import step
from atoll.node.trainer_channel import Ready


@dataclass
class Story:
    """A node of two fragments, whose coordinator gives it ten samples a round."""

    layout: pb.LayoutReported = field(default_factory=lambda: pb.LayoutReported(numel=40, fragments=[20, 20]))
    state: State = field(default_factory=State)
    version: int = 0
    encoded: list[Encode] = field(default_factory=list)

    def feed(self, event: Event) -> list[Effect]:
        self.state, effects = step(self.state, event)
        self.encoded += [e for e in effects if isinstance(e, Encode)]
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
        return self.feed(ViewArrived(view))

    def begin(self) -> None:
        """It has state 0, and trains on samples from 0 on."""
        self.feed(TrainerUp(self.layout))
        self.feed(StateMoved(0, b"state 0"))
        (train,) = self.view(0, 0)
        assert isinstance(train, OrderTraining) and not (train.resume or train.continues or train.keeps_uncounted)

    def ready(self, round_: int, ahead: bool) -> None:
        self.feed(Ready(round_, 5, 2.0, 10, 1.0, ahead))

    def reduced(self, round_: int) -> None:
        """It has every sealed chunk."""
        self.version += 1
        view = pb.View(version=self.version, committed=round_ - 1, you="active", phase="reducing")
        view.plan.round, view.plan.attempt = round_, 1
        self.feed(ViewArrived(view))
        self.feed(AttemptComplete((round_, 1), b"root %d" % round_))

    def seen(self) -> pb.View:
        assert self.state.view is not None
        return self.state.view

    def trains(self, effects: list[Effect]) -> OrderTraining:
        (train,) = [e for e in effects if isinstance(e, OrderTraining)]
        return train


def test_after_a_commit_a_trainer_that_waited_starts_from_the_local_vector() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=False)
    assert story.state.ready is not None and story.state.ready.fresh
    story.reduced(1)
    (apply,) = story.view(1, 10, sealed=b"root 1")
    assert isinstance(apply, Apply)
    train = story.trains(story.feed(StateMoved(1, b"state 1")))
    assert train.resume and train.keeps_uncounted and not (train.carried or train.continues or train.rebased)
    story.ready(2, ahead=False)
    assert story.state.ready is not None and not story.state.ready.fresh


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
    story.feed(ViewArrived(later))
    (_, recover) = story.feed(StateMoved(1, b"state 1"))
    assert isinstance(recover, Recover) and recover.rebase, "the other fragments' steps come along"
    train = story.trains(story.feed(StateMoved(2, b"state 2")))
    assert train.continues and train.rebased and not train.carried
    story.ready(3, ahead=True)
    story.reduced(3)
    story.view(3, 20, sealed=b"root 3")
    train = story.trains(story.feed(StateMoved(3, b"state 3")))
    assert train.continues and not (train.rebased or train.carried)


def test_nothing_is_kept_of_a_vector_that_a_trainer_may_have_died_over() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=False)
    story.reduced(1)
    story.view(1, 10, sealed=b"root 1")
    assert story.trains(story.feed(StateMoved(1, b"state 1"))).resume
    story.feed(TrainerDown())
    train = story.trains(story.feed(TrainerUp(story.layout)))
    assert not (train.resume or train.carried)
    story.ready(2, ahead=False)
    assert story.state.ready is not None and story.state.ready.fresh


def test_work_that_waits_to_be_reported_is_not_once_the_node_has_dropped_it() -> None:
    story = Story(pb.LayoutReported(numel=40))
    story.begin()
    story.ready(1, ahead=False)
    work = story.state.ready
    assert work is not None
    (report,) = story.feed(EncodingBegun(work, 3.0, 0.5))
    contribution = pb.ContributionReady(steps=5, samples=10, loss=2.0, delta_norm=3.0, damping=0.5, fresh=True)
    assert report == ReportReady(1, contribution)
    (recover,) = [
        e for e in story.view(0, 0, you="recovering", state_digest=b"the run's") if isinstance(e, Recover)
    ]
    assert recover.differs and story.feed(EncodingBegun(work, 3.0, 0.5)) == []
    story.feed(StateMoved(0, b"the run's"))
    story.view(0, 0, state_digest=b"the run's")
    story.feed(Ready(1, 5, 2.0, 20, 1.0))
    assert story.state.ready is not None and story.feed(EncodingBegun(work, 3.0, 0.5)) == []


def test_steps_from_a_state_that_may_not_be_the_runs_are_not_reported() -> None:
    """The report could come late, and be taken for one of the steps from the right state."""
    story = Story()
    story.begin()
    story.feed(Rejoined())
    story.view(0, 0, you="joining", state_digest=b"another")
    story.ready(1, ahead=False)
    assert story.state.ready is not None and not story.encoded
    story.view(0, 0)
    assert [e.work.samples for e in story.encoded] == [10]


def test_what_was_held_when_the_session_ended_is_applied_if_it_was_committed() -> None:
    story = Story()
    story.begin()
    story.ready(1, ahead=False)
    story.reduced(1)
    story.feed(Rejoined())
    (apply,) = story.view(1, 10, sealed=b"root 1", you="synced")
    assert isinstance(apply, Apply)


def test_who_holds_the_runs_state_by_an_older_number_gives_it_the_newer_one_and_fetches_nothing() -> None:
    story = Story()
    story.feed(TrainerUp(story.layout))
    story.feed(StateMoved(1, b"state 1"))
    assert story.view(3, 0, state_digest=b"state 1") == [Renumber(story.seen())], "rounds 2 and 3 are void"
    assert story.trains(story.feed(StateMoved(3, b"state 1"))).view.train.round == 4


def test_where_nobody_has_the_state_any_more_it_goes_back_once_to_what_its_disk_has() -> None:
    story = Story()
    story.feed(TrainerUp(story.layout))
    assert [type(effect) for effect in story.view(5, 0)] == [Recover]
    gone = {"has_state": False, "you": "recovering"}
    assert story.view(5, 0, **gone) == story.feed(MoveFailed(-1)) == [], "the others are applying it"
    assert story.view(5, 0, lost=True, **gone) == [FallBack()]
    assert story.feed(MoveFailed(-1)) == [], "its disk has nothing, either"
    assert story.view(5, 0, lost=True, **gone) == []
    assert [type(effect) for effect in story.view(5, 0, you="recovering")] == [Recover]
    story.view(5, 0, lost=True, **gone)
    assert story.feed(MoveFailed(-1)) == [FallBack()]
    assert story.feed(StateMoved(3, b"state 3")) == [ReportState(3, b"state 3")]


def test_who_has_a_new_session_says_first_what_it_holds() -> None:
    story = Story()
    story.begin()
    said = story.feed(Rejoined())
    assert said == [ReportState(0, b"state 0"), ReportLayout(story.layout)]
    story.view(1, 10)
    story.feed(Ready(1, 5, 2.0, 10, 1.0))
    assert isinstance(story.state.outer, Moving)
    assert story.feed(Rejoined()) == [ReportLayout(story.layout)], "it has no state while that moves"
