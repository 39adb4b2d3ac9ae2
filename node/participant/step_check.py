"""Sees to it that each batch of a training script is stepped once, and by one of the ways there are."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from atoll.comm.errors import ConfigError


class StepCheck:
    """Counts the steps of one batch: `expect` when it is given out, `take` when the script says that it is
    stepped."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._batch_out = self._stepped = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def expect(self) -> None:
        """A batch is given out."""
        self._batch_out, self._stepped = True, False

    def take(self, call: str, steps_optimizer: bool) -> None:
        """The script calls `call` for the batch; `steps_optimizer`: whether that steps the optimizer. Raises
        `ConfigError` where the batch was stepped before."""
        if not self._batch_out:
            raise ConfigError(
                f"{call} was called and no batch was out: call it once a batch, in the training loop"
            )
        if steps_optimizer and self._stepped:
            raise ConfigError(
                f"the script stepped its optimizer and then called {call}, which steps it again: leave out "
                "optimizer.step(), or call run.stepped(loss)"
            )
        self._batch_out = False

    def check_stepped(self) -> None:
        """Raise `ConfigError` where the last batch was not stepped."""
        if self._batch_out:
            raise ConfigError(
                "the training loop asked for a batch and had not called run.step(loss), or run.stepped(loss), for "
                "the last one: call it once a batch"
            )

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
