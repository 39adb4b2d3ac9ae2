"""Rounds of a run by hand in which all members but one do their part: what that one's conduct costs, and for how
long."""

from scenario import Run

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.state import Phase


class Story(Run):
    """Rounds in which all members but one do their part."""

    def __init__(
        self, names: list[str], liar: str = "", leaves: str = "", reducers: str = "", **settings: str
    ) -> None:
        """`leaves`, of the names, cannot be dialled; `reducers` come besides. Their names are letters here."""
        super().__init__()
        for key, value in settings.items():
            self.set(key.replace("__", "."), value)
        for name in leaves:
            self.do("leaf", [name])
        for name in reducers:
            self.do("reducer", [name])
        self.do("begin", names)
        for name in reducers:
            self.do("join", [name])
        self.liar = self.node(liar) if liar else NodeId("")

    def owners(self) -> set[NodeId]:
        return {owner for owner in self.state.round.ledger.owners if owner is not None}

    def contributes(self, node: NodeId) -> bool:
        return any(e.node == node and not e.gone for e in self.state.round.ledger.entries)

    def train(self) -> None:
        """To the first attempt of the round."""
        self.steps()
        for _ in range(200):
            if self.state.round.phase is Phase.REDUCING:
                return
            self.do("wait", ["0.25"])
        raise AssertionError(self.state.round)

    def reduce(self, seals: bool = True, holds: bool = True, limit: float = 400.0) -> float:
        """To the commit, with what the liar leaves out; the seconds that it took."""
        began, number = self.now, self.state.round.number
        while self.state.round.number == number:
            assert self.now - began < limit, self.state.round
            if self.state.round.phase is Phase.REDUCING and self.state.round.number == number:
                ledger = self.state.round.ledger
                for node in sorted(self.owners(), key=lambda n: int(n[1:])):
                    if seals or node != self.liar:
                        self.do("seal", [self.name(node)])
                ledger = self.state.round.ledger
                if self.state.round.number == number and ledger.complete:
                    for node in ledger.members:  # not all may be waited for
                        if self.state.round.number == number and (holds or node != self.liar):
                            self.do("held", [self.name(node)])
            if self.state.round.number == number:
                self.do("wait", ["0.25"])
        self.tell()
        return self.now - began

    def tell(self) -> None:
        """All that are here have the new state: first those that made it."""
        here, makers = self.state.members.here, self.state.makers
        names = [here[n].name for n in sorted(here, key=lambda n: n not in makers) if not here[n].role]
        self.do("state", [*names, str(self.state.committed)])
