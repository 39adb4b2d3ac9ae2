"""Decoding without numba: the bits of the compiled kernels, and nothing else that they do."""

import subprocess
import sys

import numpy as np
import pytest

from atoll.comm.codecs import codec as codec_module
from atoll.comm.codecs import numpy_kernels
from atoll.comm.codecs import sparse as sparse_module
from atoll.comm.codecs.codec import F32, U8, Bf16, Codec, Fp32, Int4, Int8, Malformed
from atoll.comm.codecs.sparse import Sparse
from atoll.comm.config.run import ScaleName
from atoll.comm.extras import MissingPackage

CODECS: list[Codec] = [
    *(Fp32(), Bf16(), Sparse()),
    *(made(block, scales) for made in (Int8, Int4) for block in (6, 96, 128) for scales in ScaleName),
]
SIZES = (0, 1, 5, 7, 63, 64, 65, 127, 4095, 4096, 4097, 3 * 4096 + 77, 131_072 + 95)


def decoded(codec: Codec, payload: U8, n: int) -> list[bytes]:
    """What each way to decode makes of it, added to something where it adds."""
    outs: list[F32] = [np.full(n, np.nan, np.float32) for _ in range(3)]
    codec.decode(payload, outs[0])
    codec.decode(payload, outs[1], far=True)
    codec.mean([payload, payload], [0.3, 0.5], outs[2])
    outs.append(np.linspace(-1, 1, n, dtype=np.float32))
    codec.accumulate(payload, np.float32(1 / 3), outs[3])
    return [out.tobytes() for out in outs]


def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "kernels", numpy_kernels)
    monkeypatch.setattr(sparse_module, "kernels", numpy_kernels)
    monkeypatch.setattr(sparse_module, "sparse_kernels", numpy_kernels)


def payload_of(codec: Codec, n: int) -> U8:
    random = np.random.default_rng(n)
    x = random.standard_t(3, n).astype(np.float32) * np.exp2(random.integers(-160, 90, n)).astype(np.float32)
    payload = np.empty(codec.size(n), np.uint8)
    codec.encode(x, payload)
    return payload


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_what_is_decoded_without_numba_has_the_same_bits(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = {n: payload_of(codec, n) for n in SIZES}
    expected = {n: decoded(codec, payload, n) for n, payload in payloads.items()}
    without_numba(monkeypatch)
    assert {n: decoded(codec, payload, n) for n, payload in payloads.items()} == expected


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_what_is_refused_without_numba_is_the_same(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 4096 + 65 if isinstance(codec, Sparse) else 97
    good, random = payload_of(codec, n), np.random.default_rng(0)
    broken = [good.copy() for _ in range(400)]
    for payload in broken:
        payload[random.integers(payload.size)] ^= np.uint8(1 << random.integers(8))
    broken += [random.integers(0, 256, good.size).astype(np.uint8) for _ in range(20)]
    broken += [np.full(good.size, fill, np.uint8) for fill in (0, 0x7F, 0x80, 0xFF)]

    def verdicts() -> list[bool]:
        said = []
        for payload in broken:
            try:
                codec.check(payload, n)
                said.append(True)
            except Malformed:
                said.append(False)
        return said

    expected = verdicts()
    without_numba(monkeypatch)
    assert verdicts() == expected and set(expected) == {True, False}


def test_who_would_encode_without_numba_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    without_numba(monkeypatch)
    with pytest.raises(MissingPackage, match=r'needs numba, not installed here: pip install ".\[node\]"'):
        Int8(96).encode(np.ones(9, np.float32), np.empty(Int8(96).size(9), np.uint8))


def test_who_looks_through_all_modules_for_a_name_finds_none_here() -> None:
    assert not hasattr(numpy_kernels, "torch")


def test_an_export_needs_neither_numba_nor_torch() -> None:
    script = (
        "import sys; sys.modules.update(numba=None, llvmlite=None, torch=None);"
        "import numpy as np; import atoll.node.cli, atoll.node.export.command;"
        "from atoll.comm.codecs.codec import Int8; c = Int8(6); out = np.ones(7, np.float32);"
        "c.decode(bytes(c.size(7)), out); assert not out.any()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
