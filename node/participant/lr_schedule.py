"""The inner learning rate as a function of the run's committed tokens, so that all nodes agree on it."""

import math

from atoll.comm.config.run import InnerConfig


def learning_rate(inner: InnerConfig, tokens: float) -> float:
    """Linear warm-up to the peak over `warmup_tokens`, then a cosine to the least at `decay_tokens` and after."""
    if tokens < inner.warmup_tokens:
        return inner.peak_lr * tokens / inner.warmup_tokens
    done = min(1.0, (tokens - inner.warmup_tokens) / (inner.decay_tokens - inner.warmup_tokens))
    return inner.final_lr + (inner.peak_lr - inner.final_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
