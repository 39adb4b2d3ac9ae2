"""The arithmetic of a round: floating-point operations of its training, bytes of its exchange, and what share of
the time a node trains. Pure; for the comments of the shipped configs, `atoll coordinator check`, and the MFU that
a participant reports.
"""

from dataclasses import dataclass

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig


def flops_per_token(model: ModelConfig) -> float:
    """Floating-point operations that a model needs for a token, forward and backward: 6 N + 12 L d T (PaLM,
    arXiv 2204.02311, appendix B), for N parameters that multiply, L layers whose heads are d wide together, and
    sequences of T tokens. The embedding multiplies only where it is the output head as well: a look-up is no work.
    What activation checkpointing computes again does not count."""
    looked_up = 0 if model.tied_head else model.vocab_size * model.dim
    attended = model.heads * model.head_width * model.seq_len
    return 6 * (model.n_params - looked_up) + 12 * model.layers * attended


def tokens_per_step(run: RunConfig) -> int:
    """Tokens of one inner step of a node."""
    return run.inner.batch_size * run.model.seq_len


def flops_per_round(run: RunConfig) -> float:
    """Floating-point operations of a node's inner steps of one round."""
    return run.round_steps * tokens_per_step(run) * flops_per_token(run.model)


def exchanged_bytes(run: RunConfig, members: int) -> float:
    """Bytes that each of `members` nodes sends, and receives as many, in the exchange of one round: 2 (n - 1) / n
    of an encoded vector, the least that an all-reduce takes."""
    elements = run.model.n_params / (run.fragments.count if run.fragments.stagger else 1)
    return elements * run.reduce.bytes_per_element * 2 * (members - 1) / members


def exchange_seconds(run: RunConfig, members: int, up: float, down: float) -> float:
    """Seconds that the exchange of one round takes at least where `members` nodes take equal parts, of which this
    one sends `up` and takes in `down` bytes a second. Coordinators plan for what they see of links: who is slower
    than the others owns less, and sends less."""
    return exchanged_bytes(run, members) / min(up, down)


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round without overlap: first it trains, then it exchanges."""

    training: float
    exchange: float

    @classmethod
    def of(cls, run: RunConfig, members: int, flops: float, bits: float) -> "RoundTime":
        """The times of `members` nodes that compute `flops` FLOP/s (the cards' peak times the MFU), with links of
        `bits` bit/s each way."""
        return cls(flops_per_round(run) / flops, 8 * exchanged_bytes(run, members) / bits)

    @property
    def utilisation(self) -> float:
        """Share of the time in which a node trains."""
        return self.training / (self.training + self.exchange)
