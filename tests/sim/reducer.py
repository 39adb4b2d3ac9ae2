"""A simulated reducer (`atoll.node.daemon.reducer`): it takes part in reduces, with chunks of its own."""

from sim.node import Node

from atoll.node import state_machine


class Reducer(Node):
    @property
    def progress(self) -> tuple[str, int, int]:
        return "waiting" if self.plane.reduce is None else "sync", 0, 0

    def feed(self, event: state_machine.Event) -> None:
        reduce = self.plane.reduce
        match event:
            case state_machine.ViewArrived(view) if view.finished:
                self.control.leave("the run is finished")
                self.world.kill(self)
            case state_machine.ViewArrived(view) if view.HasField("plan"):
                self.world.planned(view.plan)
                self.plane.begin(view.plan, None)
            case state_machine.ViewArrived(view) if reduce is not None and reduce.round <= view.committed:
                self.plane.cancel()
            case state_machine.Rejoined():
                self.plane.cancel()
            case _:  # of a trainer, which it has not, or a state
                pass
