"""The samples of a run whose data are a plugin's: what an entry point of the group atoll.data opens on this node.

The package's own code says what a sample is, so each one is checked before it is trained on: its arrays' shape and
type, and that its tokens are of the run's vocabulary. That all nodes have the same samples is the package's
promise.
"""

from collections.abc import Iterator

import numpy as np

from atoll.comm.config.plugin import Plugin, PluginGroup
from atoll.comm.config.run import RunConfig
from atoll.node.config import NodeConfig
from atoll.node.data.samples import UNLEARNED, Sample, Source


class PluginSource:
    """The `Source` that a plugin has opened, whose samples are checked."""

    def __init__(self, source: Source, plugin: Plugin, seq_len: int, vocab_size: int) -> None:
        self._source, self._plugin = source, plugin
        self._seq_len, self._vocab_size = seq_len, vocab_size

    def train(self, index: int) -> Sample:
        """Training sample `index`. Raises `ConfigError` for one that the run's model cannot be trained on."""
        return self._checked(self._source.train(index), f"training sample {index}")

    def validation(self, index: int) -> Sample:
        """Validation sample `index`, likewise."""
        return self._checked(self._source.validation(index), f"validation sample {index}")

    def expect(self, indices: Iterator[int]) -> None:
        """Tell the plugin's source which training samples are asked for next."""
        self._source.expect(indices)

    def _checked(self, sample: Sample, which: str) -> Sample:
        if not isinstance(sample, Sample):
            raise self._plugin.unusable(
                f"gives a {type(sample).__name__} as {which}: it must be an atoll.node.data.samples.Sample"
            )
        for name, array in sample.arrays.items():
            shape, kind = getattr(array, "shape", None), getattr(array, "dtype", type(array).__name__)
            if shape != (self._seq_len,) or kind != np.int64:
                raise self._plugin.unusable(
                    f"gives {which} with {name} of shape {shape} and type {kind}: it must be ({self._seq_len},) "
                    "int64, as model.seq_len says"
                )
        learned = sample.labels[sample.labels != UNLEARNED]
        for name, tokens in (("input_ids", sample.input_ids), ("labels", learned)):
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                raise self._plugin.unusable(
                    f"gives {which} with {name} from {tokens.min()} to {tokens.max()}: they must be in 0 ... "
                    f"{self._vocab_size - 1}, as model.vocab_size says"
                )
        return sample


def check_plugin(run: RunConfig) -> None:
    """Raise the `AtollError` that `open_plugin` would for a package that is not installed; nothing is imported."""
    _plugin(run).find()


def open_plugin(run: RunConfig, node: NodeConfig) -> PluginSource:
    """The samples that the run's plugin opens on this node. Raises an `AtollError` where it is not installed,
    fails, or returns no source."""
    plugin = _plugin(run)
    source = plugin.call(run, node)
    for method in ("train", "validation", "expect"):
        if not callable(getattr(source, method, None)):
            raise plugin.unusable(
                f"returned a {type(source).__name__} without {method}(): it must return an "
                "atoll.node.data.samples.Source"
            )
    return PluginSource(source, plugin, run.model.seq_len, run.model.vocab_size)


def _plugin(run: RunConfig) -> Plugin:
    plugin = run.plugin(PluginGroup.DATA)
    assert plugin is not None, "data.kind is plugin, and its rules demand a name"
    return plugin
