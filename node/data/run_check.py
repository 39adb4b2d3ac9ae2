"""What can be seen of a run's data sets before any node has joined: `atoll coordinator check` and `start` look.

Only manifests are read, and two bytes by which it shows whether a server knows ranges. A store that cannot be
reached from here is no error: nodes may reach it, or have the data set in a folder of their own.
"""

from collections.abc import Callable

from atoll.comm.config.data import DataKind, DataSetConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError
from atoll.node.data.dataset import Slice, check_fits, check_one_tokenizer
from atoll.node.data.manifest import DIGESTS_SUFFIX, MANIFEST, MAX_MANIFEST_BYTES, Manifest
from atoll.node.data.store import RangesUnknown, Store, StoreError, open_store


def check_data_of_run(run: RunConfig, warn: Callable[[str], None]) -> None:
    """Compare the manifests of the run's data sets with its config: digests, vocabulary, slices, length of
    samples, one tokenizer in a mixture. `warn` takes a sentence about a store that could not be asked. Raises
    `ConfigError` where nodes would end with it."""
    if run.data.kind is not DataKind.DATASET:
        return
    found = [(part, _manifest(part, warn)) for part in run.data.sets]
    manifests = [manifest for _, manifest in found if manifest is not None]
    for part, manifest in found:
        if manifest is None:
            continue
        check_fits(manifest, part.url, run)
        for name in (run.data.slice, run.data.validation):
            Slice.of(0, manifest, name, run.model.seq_len, run.seed)
    if manifests:
        check_one_tokenizer(manifests)


def _manifest(part: DataSetConfig, warn: Callable[[str], None]) -> Manifest | None:
    """The manifest of a data set; None: it cannot be read from here."""
    try:
        store = open_store(part.url, files=True)
        data = store.read_whole(MANIFEST, MAX_MANIFEST_BYTES)
    except (StoreError, AtollError) as error:
        warn(f"the data set at {part.url} is not looked at: {error}")
        return None
    manifest = Manifest.decode(data, part.digest)
    _check_ranges(store, manifest, warn)
    return manifest


def _check_ranges(store: Store, manifest: Manifest, warn: Callable[[str], None]) -> None:
    try:
        store.read(manifest.shards[0].name + DIGESTS_SUFFIX, 1, 1)
    except RangesUnknown as error:
        raise ConfigError(str(error)) from None
    except StoreError as error:
        warn(f"{store.url} has a manifest, and its first shard cannot be read: {error}")
