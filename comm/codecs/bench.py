"""`atoll bench codec`: what a codec costs this machine, and what it costs the mean.

The times are those of one thread on a part of a chunk, which is what a node works on at once: to encode it, and to
decode it and add it to a sum, as its owner does with each contribution. The errors are those of the mean over some
members of which each encoded its part and the owner encoded the mean, relative to the exact mean, in the l2 norm.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import msgspec
import numpy as np
from rich.table import Table

from atoll.comm.codecs.codec import F32, Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName, ReduceConfig, ScaleName
from atoll.comm.extras import demand
from atoll.comm.options import json_option
from atoll.comm.terminal import show_table

ERROR_SAMPLE = 1 << 18  # elements of a vector whose mean is taken
Draw = Callable[[np.random.Generator, int], F32]


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """The figures of one codec; errors are relative l2 norms, of normal data and of Student's t with 3 degrees."""

    encode_ns: float  # of one element, like the next; the median over the repetitions
    decode_accumulate_ns: float
    bytes_per_element: float
    rel_err_normal_4: float
    rel_err_normal_16: float
    rel_err_t3_4: float
    rel_err_t3: float  # over 16 members


@click.command()
@click.option(
    "--chunk", default=ReduceConfig().chunk // 4, show_default=True, type=click.IntRange(1), help="Elements."
)
@click.option(
    "--block",
    default=ReduceConfig().block,
    show_default=True,
    type=click.IntRange(2),
    help="Elements that share a scale.",
)
@click.option(
    "--scales",
    default=ReduceConfig().scales.value,
    show_default=True,
    type=click.Choice([s.value for s in ScaleName]),
    help="Format of the scales.",
)
@click.option("--repeat", default=300, show_default=True, type=click.IntRange(1), help="Times that each is done.")
@json_option
def codec(chunk: int, block: int, scales: str, repeat: int, as_json: bool) -> None:
    """Time every codec on one thread, and measure the error of a mean."""
    demand("atoll bench codec", "numba")
    if block % 2:
        raise click.UsageError(f"a block of {block} elements: it must be even")
    figures = {name: measure(make_codec(name, block, ScaleName(scales)), chunk, repeat) for name in CodecName}
    if as_json:
        click.echo(msgspec.json.encode({"codecs": figures}).decode())
        return
    show_table(_table(figures))


def measure(codec: Codec, chunk: int, repeat: int) -> CodecFigures:
    """Time a codec on `chunk` elements, `repeat` times, and take the errors of its means."""
    x = _normal(np.random.default_rng(0), chunk)
    payload, total = np.empty(codec.size(chunk), np.uint8), np.zeros(chunk, np.float32)
    weight = np.float32(0.25)
    return CodecFigures(
        encode_ns=_seconds(lambda: codec.encode(x, payload), repeat) / chunk * 1e9,
        decode_accumulate_ns=_seconds(lambda: codec.accumulate(payload, weight, total), repeat) / chunk * 1e9,
        bytes_per_element=payload.size / chunk,
        rel_err_normal_4=error(codec, _normal, 4),
        rel_err_normal_16=error(codec, _normal, 16),
        rel_err_t3_4=error(codec, _student, 4),
        rel_err_t3=error(codec, _student, 16),
    )


def error(codec: Codec, draw: Draw, members: int) -> float:
    """Relative error of a sealed mean of so many members: |sealed - exact| / |exact|."""
    random = np.random.default_rng(members)
    mean, exact = np.zeros(ERROR_SAMPLE, np.float32), np.zeros(ERROR_SAMPLE, np.float64)
    payload = np.empty(codec.size(ERROR_SAMPLE), np.uint8)
    for _ in range(members):
        x = draw(random, ERROR_SAMPLE)
        codec.encode(x, payload)
        codec.accumulate(payload, np.float32(1 / members), mean)
        exact += x
    exact /= members
    codec.encode(mean, payload)
    codec.decode(payload, mean)
    return float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))


def _normal(random: np.random.Generator, n: int) -> F32:
    return random.standard_normal(n, dtype=np.float32)


def _student(random: np.random.Generator, n: int) -> F32:
    return random.standard_t(3, n).astype(np.float32)


def _seconds(call: Callable[[], None], repeat: int) -> float:
    """The median of how long a call takes, after one that loads the kernels and the caches."""
    call()
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return float(np.median(times))


def _table(figures: dict[CodecName, CodecFigures]) -> Table:
    table = Table("codec", title="ns to encode, to decode and add; bytes; % error of the mean of 4 and of 16")
    for column in ("encode", "add", "bytes", "normal 4", "16", "t(3) 4", "16"):
        table.add_column(column, justify="right")
    for name, f in figures.items():
        errors = (f.rel_err_normal_4, f.rel_err_normal_16, f.rel_err_t3_4, f.rel_err_t3)
        table.add_row(
            name,
            f"{f.encode_ns:.2f}",
            f"{f.decode_accumulate_ns:.2f}",
            f"{f.bytes_per_element:.3f}",
            *(f"{100 * e:.2g}" for e in errors),
        )
    return table
