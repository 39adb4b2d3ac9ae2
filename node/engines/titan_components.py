"""Components of torchtitan's configuration that a run brings: its text, and metrics that tell each step's loss.

torchtitan builds what its configuration names; these take the places of its own loader, tokenizer, validator and
metrics. Imported only once torchtitan's configuration is loaded (`atoll.node.engines.torchtitan`): torchtitan
looks for its device when it is imported, and a volunteer's own module may name another before.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator

from atoll.node.participant.batches import Batch, RunTokens, Share, pieces


class TokensOnly(BaseTokenizer):  # type: ignore[misc]
    """The tokenizer of a run whose text comes as tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError("the run's text comes as tokens")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("the run's text comes as tokens")

    def get_vocab_size(self) -> int:
        raise NotImplementedError("the run's text comes as tokens")


class RunTextLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of the run's own validation text, this rank's share. Training batches come from the participant; in
    their place in torchtitan's configuration this loader is empty."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The text, and how much of it."""

        tokens: RunTokens | None = None
        batches: int = 0
        batch_size: int = 0  # sequences, of all ranks
        infinite: bool = False  # set by torchtitan's validator; of no effect

        def to_dict(self) -> dict[str, Any]:
            """The part that torchtitan may log with its configuration."""
            return {"batches": self.batches, "batch_size": self.batch_size}

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        self._config, self._micro_batch = config, local_batch_size
        self._share = Share(dp_rank, dp_world_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        config = self._config
        if config.tokens is None:
            return
        for number in range(config.batches):
            first = number * config.batch_size
            indices = range(first, first + config.batch_size)[self._share.of(config.batch_size)]
            yield from micro_batches(config.tokens.validation(indices), self._micro_batch)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class RunValidator(Validator):  # type: ignore[misc]
    """torchtitan's validator, called when the run asks for it and never by itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):  # type: ignore[misc]
        """The settings of torchtitan's validator."""

    def should_validate(self, step: int) -> bool:
        return False


class StepMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, which besides tell the loss and the gradient's norm of each step."""

    TAKEN: ClassVar[tuple[str, ...]] = (
        *("log_freq", "enable_tensorboard", "enable_wandb", "save_tb_folder", "save_for_all_ranks"),
    )

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The settings of torchtitan's metrics, in a log without colors."""

        disable_color_printing: bool = True

    loss: float = math.nan  # of the last step: mean over the node's batch, nats a token
    gradient_norm: float = math.nan  # of the last step, before it was bounded
    validation_loss: float = math.nan  # nats a token, of the last validation

    def should_log(self, step: int) -> bool:
        """True: torchtitan adds up the ranks' losses for steps that it logs."""
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Remember the step's loss, and log every `log_freq` steps."""
        self.loss, self.gradient_norm = global_avg_loss, grad_norm
        if super().should_log(step):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Remember the loss."""
        self.validation_loss = loss


def micro_batches(batch: Batch, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """A batch as torchtitan's loaders give it: `size` samples at a time, inputs, positions and labels, (size, T)
    each. As here, its labels are the next tokens, -100 where none is learned, and its positions begin anew with
    each document."""
    for piece in pieces(batch, size):
        yield {"input": piece["input_ids"], "positions": piece["position_ids"]}, piece["labels"]
