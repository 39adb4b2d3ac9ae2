"""The codec that a run's config names.

A new codec is a class with `codec.Codec`'s methods, entered here, in `CodecName` and in
`ReduceConfig.bytes_per_element` (both in atoll/comm/config/run.py).
"""

from typing import assert_never

from atoll.comm.codecs.codec import Bf16, Codec, Fp32, Int4, Int8
from atoll.comm.codecs.sparse import Sparse
from atoll.comm.config.run import CodecName, RunConfig, ScaleName


def codec_of(run: RunConfig) -> Codec:
    """The codec of a run."""
    return make_codec(run.reduce.codec, run.reduce.block, run.reduce.scales)


def make_codec(name: CodecName, block: int, scales: ScaleName = ScaleName.FP16) -> Codec:
    """The codec of a run's config; `block` and `scales` are ignored by codecs that have no scales."""
    match name:
        case CodecName.FP32:
            return Fp32()
        case CodecName.BF16:
            return Bf16()
        case CodecName.INT8:
            return Int8(block, scales)
        case CodecName.INT4:
            return Int4(block, scales)
        case CodecName.SPARSE:
            return Sparse()
        case _:
            assert_never(name)
