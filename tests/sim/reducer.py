"""A simulated reducer (`atoll.node.daemon.reducer`): it takes part in reduces, with chunks of its own."""

from sim.node import Node

from atoll.node.state_machine import events as node_ev


class Reducer(Node):
    paused = saves_bytes = False
    left = False  # it left a reduce to save bytes, which the coordinator may not have heard yet

    @property
    def silent(self) -> bool:
        return self.saves_bytes

    @property
    def wishes(self) -> tuple[bool, bool]:
        return self.paused, self.saves_bytes or self.left

    @property
    def progress(self) -> tuple[str, int, int]:
        return "waiting" if self.plane.reduce is None else "sync", 0, 0

    def feed(self, event: node_ev.Event) -> None:
        reduce = self.plane.reduce
        if isinstance(event, node_ev.ViewArrived):
            self.left = self.left and not event.view.saves_bytes
            if not self.wishes[1]:
                self.audits.follow(event.view)
        match event:
            case node_ev.PauseChanged(paused, saves_bytes):
                self.paused, self.saves_bytes = paused, saves_bytes
                if saves_bytes:
                    self.left = self.left or reduce is not None
                    self.plane.cancel()
                    self.audits.stop()
            case node_ev.ViewArrived(view) if view.finished:
                self.control.leave("the run is finished")
                self.world.kill(self)
            case node_ev.ViewArrived(view) if view.HasField("plan") and self.wishes[1]:
                pass
            case node_ev.ViewArrived(view) if view.HasField("plan"):
                plan = view.plan
                self.world.planned(plan)
                if reduce is None or reduce.round != plan.round or plan.attempt > reduce.plan.attempt:
                    self.plane.begin(plan, None)
            case node_ev.ViewArrived(view) if reduce is not None and reduce.round <= view.committed:
                self.plane.cancel()
            case node_ev.Rejoined():
                self.left = False
                self.audits.stop()
                self.plane.cancel()
            case _:  # of a trainer, which it has not, or a state
                pass
