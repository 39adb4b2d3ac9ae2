"""Kernels are compiled before anybody waits for them: by one process of several, and only what is needed."""

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atoll.comm.codecs import codec as codec_module
from atoll.comm.codecs import sparse as sparse_module
from atoll.comm.codecs import warm_up as warm_up_module
from atoll.comm.codecs.codec import Bf16, Codec, Fp32, Int4, Int8
from atoll.comm.codecs.sparse import Sparse
from atoll.comm.codecs.warm_up import LOCK_PATIENCE, exercise, warm_up, warm_up_in_thread
from atoll.comm.config.run import ScaleName

SCRIPT = """
import sys; from pathlib import Path
from atoll.comm.codecs import warm_up
from atoll.comm.codecs.codec import Int8, kernels
from atoll.comm.config.run import ScaleName
warm_up.LOCK_PATIENCE = 600.0  # seconds: however long the compiler takes
warm_up.warm_up(Int8(96, ScaleName.FP16), print, Path(sys.argv[1]))
from atoll.comm.codecs.kernels import SIGNATURES
print("loaded", *sorted(k.__name__ for k in SIGNATURES if k.nopython_signatures))
"""


@pytest.mark.long
def test_of_several_processes_one_compiles_and_only_what_its_codec_calls(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "lock")]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0] for process in processes]
    assert sum("compiling kernels, once" in text for text in said) == 1
    assert sum("kernels compiled in" in text for text in said) == 1
    (loaded,) = {text.splitlines()[-1] for text in said}
    assert "to_int8" in loaded and "mean_int8" in loaded and "from_shares" in loaded
    assert "int4" not in loaded and "bf16" not in loaded and "fp32" not in loaded


class Recorded:
    """Kernels that note which of them were called."""

    def __init__(self, kernels: object) -> None:
        self._kernels, self.called = kernels, set[str]()

    def __getattr__(self, name: str) -> object:
        self.called.add(name)
        return getattr(self._kernels, name)


@pytest.mark.parametrize(
    "codec",
    [Fp32(), Bf16(), Sparse(), *(made(96, scales) for made in (Int8, Int4) for scales in ScaleName)],
    ids=lambda codec: type(codec).__name__,
)
def test_a_warm_codec_asks_for_no_other_kernel_later(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    recorded = {module: Recorded(module.kernels) for module in (codec_module, sparse_module)}
    for module, kernels in recorded.items():
        monkeypatch.setattr(module, "kernels", kernels)
    packed = Recorded(sparse_module.sparse_kernels)
    monkeypatch.setattr(sparse_module, "sparse_kernels", packed)
    exercise(codec)
    warm = [set(kernels.called) for kernels in (*recorded.values(), packed)]
    for n in (1, 97, 4096 * 3, 131_072 + 95):
        x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
        payload, out = np.empty(codec.size(n), np.uint8), np.empty(n, np.float32)
        codec.encode(x, payload)
        codec.decode(payload, out)
        codec.mean([payload] * 3, [0.2, 0.3, 0.5], out)
    assert [kernels.called for kernels in (*recorded.values(), packed)] == warm


def test_without_a_lock_file_it_is_done_all_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    warm_up(Fp32(), said.append, tmp_path / "no such folder" / "lock")
    warm_up(Fp32(), said.append, tmp_path / "lock")
    assert len(said) in (0, 2)


def test_who_is_stopped_waits_for_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, waits = tmp_path / "lock", threading.Event()
    others = lock.open("w")
    fcntl.flock(others, fcntl.LOCK_EX)  # of another descriptor: as another process's
    locked = warm_up_module._locked

    def noted(file: int) -> bool:
        found = locked(file)
        waits.set()
        return found

    monkeypatch.setattr(warm_up_module, "_locked", noted)

    async def story() -> None:
        warming = asyncio.create_task(warm_up_in_thread(Fp32(), lambda _: None, lock))
        await asyncio.to_thread(waits.wait)
        warming.cancel()

    began = time.monotonic()
    asyncio.run(story())  # it joins the threads
    assert time.monotonic() - began < LOCK_PATIENCE / 2
    others.close()
