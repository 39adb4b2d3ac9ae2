"""What a whole run comes to, for the summary of its wandb run. Pure; the last figures are there without it."""

from dataclasses import dataclass, field
from math import inf, isfinite

from atoll.coordinator.history.series import SeriesTable
from atoll.coordinator.state_machine.events import CommitRecord

LOSSES = {
    "val_loss": "best/loss_val",
    "train_loss": "best/loss_train",
}  # of a record, as the summary names the least


@dataclass
class RunSummary:
    """The least losses so far, and the rounds that had them."""

    least: dict[str, tuple[float, int]] = field(default_factory=dict)  # by field of the record: loss, round

    def take_series(self, table: SeriesTable) -> None:
        """Take in the figures of many rounds."""
        for loss in LOSSES:
            for number, value in zip(table.column("round"), table.column(loss), strict=True):
                self._take(loss, float(value), int(number))

    def take(self, record: CommitRecord) -> bool:
        """Take in a record; whether something became better by it."""
        if record.void:
            return False
        before = dict(self.least)
        for loss in LOSSES:
            if (value := getattr(record, loss)) is not None:
                self._take(loss, value, record.round)
        return self.least != before

    def values(self) -> dict[str, float]:
        """The summary's values, by name."""
        out: dict[str, float] = {}
        for loss, (value, number) in self.least.items():
            out |= {LOSSES[loss]: value, f"{LOSSES[loss]}_round": number}
        return out

    def _take(self, loss: str, value: float, number: int) -> None:
        if isfinite(value) and value < self.least.get(loss, (inf, 0))[0]:
            self.least[loss] = value, number
