"""The data of a run: where its text comes from, and in which shares."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.comm.config.plugin import name_rules
from atoll.comm.config.rules import Rule, ambiguous, positive, store_url

MAX_DATA_SETS = 64  # of a mixture: each node has all their manifests in memory


class DataKind(StrEnum):
    """The source of a run's text, and of its tokens."""

    STDLIB = "stdlib"  # the Python standard library's own source, as bytes
    BYTES = "bytes"  # a folder of text files on each node, as bytes
    DATASET = "dataset"  # data sets that nodes fetch from a URL, as `atoll data build` makes them
    SCRIPT = "script"  # none: each node's own training script has the samples, by their index
    PLUGIN = "plugin"  # what an entry point of a package that is installed on each node opens


@dataclass
class DataSetConfig:
    """A data set, and its part of a mixture."""

    url: str = ""  # of the folder with its manifest.json: https://, s3://, hf://, or what else fsspec knows
    digest: str = ""  # of its manifest.json, hexadecimal, as `atoll data check URL` prints it
    weight: float = 1.0  # its part of the samples: this, of the sum of all weights

    def rules(self, key: str) -> Iterator[Rule]:
        """Rules of the data set at `key`, data or data.mixture[0]."""
        yield bool(self.url), f"{key}.url is empty: give the URL of a data set"
        yield from store_url(f"{key}.url", self.url)
        yield (
            not (found := ambiguous(self.url)),
            f"{key}.url is {self.url!r}: it must be without {found!r}; a store's credentials are in the "
            "environment",
        )
        yield (
            bool(self.digest),
            f"{key}.url is {self.url}, and {key}.digest is empty: `atoll data check {self.url}` prints the digest",
        )
        yield (
            re.fullmatch(r"[0-9a-f]{32}", self.digest) is not None,
            f"{key}.digest is {self.digest!r}: it must be the 32 hexadecimal digits that "
            f"`atoll data check {self.url}` prints",
        )
        yield 0 < self.weight < 1e9, f"{key}.weight is {self.weight:g}: it must be a number above 0"


MAX_PASSAGE_TOKENS = 256  # each is a forward pass, and the next round waits for them


@dataclass
class DataConfig:
    """The data that a run trains on, and how often its anchor is evaluated."""

    kind: DataKind = DataKind.STDLIB
    url: str = ""  # kind dataset: of the data set; see `DataSetConfig`
    digest: str = ""  # kind dataset: of its manifest.json, as `atoll data check URL` prints it
    mixture: list[DataSetConfig] = field(default_factory=list)  # in the place of one data set
    plugin: str = ""  # kind plugin: name of an entry point of the group atoll.data
    slice: str = "train"  # kind dataset: the part of each data set that is trained on
    validation: str = "validation"  # kind dataset: the part that the anchor is evaluated on
    val_every: int = 20  # kinds stdlib and bytes: every n-th file is validation
    val_batches: int = 4  # batches in one evaluation of the anchor
    eval_every: int = 1  # rounds, or turns of all fragments, between evaluations of the anchor
    passage_tokens: int = 0  # that the model writes at each evaluation, for people to read; 0: none

    def rules(self) -> Iterator[Rule]:
        """Rules of the data and of its evaluations."""
        yield from positive("data", val_batches=self.val_batches, eval_every=self.eval_every)
        yield self.val_every >= 2, f"data.val_every is {self.val_every}: it must be 2 or more"
        yield (
            0 <= self.passage_tokens <= MAX_PASSAGE_TOKENS,
            f"data.passage_tokens is {self.passage_tokens}: it must be 0 to {MAX_PASSAGE_TOKENS}",
        )
        yield from name_rules("data.plugin", self.plugin)
        yield (
            bool(self.plugin) is (self.kind is DataKind.PLUGIN),
            f"data.kind is {self.kind}, and data.plugin is {self.plugin!r}: set data.kind=plugin and data.plugin "
            "to the name of an entry point, or neither",
        )
        if self.kind is not DataKind.DATASET:
            yield (
                not (self.url or self.digest or self.mixture),
                f"data.kind is {self.kind}, and a data set is given: set data.kind=dataset, or leave out "
                "data.url, data.digest and data.mixture",
            )
            return
        yield (
            bool(self.url or self.mixture),
            "data.kind is dataset, and no data set is given: build one (`atoll data build`), or choose one that "
            "is there, and give data.url=URL and data.digest=DIGEST, as `atoll data check URL` prints them",
        )
        yield (
            not (self.mixture and (self.url or self.digest)),
            "data.mixture and data.url are given: name all data sets in data.mixture, or one by data.url",
        )
        yield (
            len(self.mixture) <= MAX_DATA_SETS,
            f"data.mixture has {len(self.mixture)} data sets: {MAX_DATA_SETS} are the most, build larger ones",
        )
        for number, part in enumerate(self.mixture):
            yield from part.rules(f"data.mixture[{number}]")
        if not self.mixture:
            yield from self.sets[0].rules("data")
        for key, name in (("slice", self.slice), ("validation", self.validation)):
            yield bool(name), f"data.{key} is empty: name a slice of the data set, such as train or validation"
        yield (
            self.slice != self.validation,
            f"data.slice and data.validation are both {self.slice}: what is validation is never trained on",
        )

    @property
    def sets(self) -> tuple[DataSetConfig, ...]:
        """The data sets of a run of kind dataset."""
        return tuple(self.mixture) or (DataSetConfig(self.url, self.digest),)
