"""The loops over elements that the codecs are made of, compiled; they release the GIL.

Each operation is an IEEE one that is rounded once, in the order written: no fused multiply-add, no
reassociation, so that every processor computes the same bits. A quotient by a block's scale is computed as the
product with its inverse, both rounded: it is exact to 2**-15 of a step, so that the error of an element is
half a step and as much more at most.

`compiled` compiles a kernel, once in the life of an installation: the machine code is kept beside this file, or in
the user's cache where that place is read-only (NUMBA_CACHE_DIR names another). The codecs ask for it by way of
`atoll.comm.codecs.loaded`, so that no more is compiled than a run's codec needs.
Arrays are contiguous; they may be read-only where they are not written, and need no alignment.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
Addresses = NDArray[np.intp]
F = TypeVar("F", bound=Callable[..., Any])

MAGNITUDE = np.uint32(0x7FFFFFFF)  # all bits but the sign
INFINITY = np.uint32(0x7F800000)  # the magnitude's bits from which on a number is not finite
SMALLEST_NORMAL = np.float32(2.0**-126)
# A sum with it has no bits after the point, was rounded to nearest even, and ends with the integer's low bits.
ROUNDING_SHIFT = np.float32(1.5 * 2**23)
# The inverse of a scale below SMALL_SCALE might overflow or the scale be subnormal: LIFT takes both out of danger.
SMALL_SCALE = np.float32(2.0**-100)
LIFT = np.float32(2.0**64)
LARGEST_BF16 = np.uint32(0x7F7F)  # the bits of the largest finite number
STORE_ELEMENTS, CACHE_LINE = 16, 64  # fp32 elements that one instruction writes, and their bytes
REGISTER_ELEMENTS = 32  # fp32 elements of a sum that stay in registers
ZERO, ONE = np.float32(0), np.float32(1)
ONE_SHARE = np.uint16(0x3C00)  # 1 in fp16
HALF_NORMAL = np.float32(2.0**-14)  # below it, fp16 numbers are multiples of 2**-24
HALF_STEP = np.float32(2.0**24)
HALF_SCALE = np.float32(2.0**112)
HALF_BIAS = 112 << 23  # the difference of the two formats' exponents, where fp32 has its exponent

SIGNATURES: dict[Any, Any] = {}  # of each kernel

_f32, _u8, _u16, _u32, _int = types.float32, types.uint8, types.uint16, types.uint32, types.intp


def _read(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _write(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", aligned=False)


def _kernel(result: Any, *arguments: Any) -> Callable[[F], F]:
    """A kernel of these types, to be compiled by `compiled`."""

    def declare(function: F) -> F:
        options: Any = {"nogil": True, "error_model": "numpy"}
        try:
            kernel: F = njit(cache=True, **options)(function)
        except RuntimeError:  # no place to keep machine code in
            kernel = njit(**options)(function)
        SIGNATURES[kernel] = result(*arguments)
        return kernel

    return declare


def compiled(kernel: Any) -> Any:
    """The kernel, compiled for the types that it is declared with and for no others; what it calls comes first."""
    if kernel.nopython_signatures:
        return kernel
    for name in kernel.py_func.__code__.co_names:
        if (called := kernel.py_func.__globals__.get(name)) in SIGNATURES:
            compiled(called)
    kernel.compile(SIGNATURES[kernel])
    kernel.disable_compile()
    return kernel


def _bitcast(source: Any, target: Any, to: ir.Type) -> Any:
    def typed(_: Any, x: Any) -> Any:
        def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], to)

        return target(source), generate

    return typed


def _put_far(_: Any, values: Any, scale: Any, out: Any, at: Any) -> Any:
    """`out[i] = signed(values[i]) * scale` for STORE_ELEMENTS elements from `at` on, whose address is a multiple
    of CACHE_LINE: a store that does not read the line first, nor keeps it (LLVM: nontemporal)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, (bytes_, numbers) = (
            arguments[3],
            (ir.VectorType(t, STORE_ELEMENTS) for t in (ir.IntType(8), ir.FloatType())),
        )

        def place(i: int, vector: ir.Type) -> Any:
            data = context.make_array(signature.args[i])(context, builder, arguments[i]).data
            return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())

        none = ir.Constant(numbers, ir.Undefined)
        one = builder.insert_element(none, arguments[1], ir.Constant(ir.IntType(32), 0))
        each = builder.shuffle_vector(
            one, none, ir.Constant(ir.VectorType(ir.IntType(32), STORE_ELEMENTS), [0] * STORE_ELEMENTS)
        )
        product = builder.fmul(builder.sitofp(builder.load(place(0, bytes_), align=1), numbers), each)
        store = builder.store(product, place(2, numbers), align=CACHE_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(values, scale, out, at), generate


def _sum_wide(_: Any, addresses: Any, scales: Any, weights: Any, out: Any, block: Any, at: Any) -> Any:
    """`out[i] = sum_k weights[k] * (signed(byte i at addresses[k]) * scales[k, block])` for REGISTER_ELEMENTS
    elements from `at` on, which stay in registers: from 0, in this order, each operation rounded."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_, numbers = (ir.VectorType(t, REGISTER_ELEMENTS) for t in (ir.IntType(8), ir.FloatType()))
        index, none = ir.IntType(64), ir.Constant(numbers, ir.Undefined)
        arrays = [
            context.make_array(t)(context, builder, a)
            for t, a in zip(signature.args[:4], arguments[:4], strict=True)
        ]
        of_term, of_block, of_weight, to = (array.data for array in arrays)
        terms, blocks = (builder.extract_value(arrays[1].shape, i) for i in range(2))

        def everywhere(number: Any) -> Any:
            one = builder.insert_element(none, number, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(
                one, none, ir.Constant(ir.VectorType(ir.IntType(32), REGISTER_ELEMENTS), [0] * REGISTER_ELEMENTS)
            )

        llvm: Any = cgutils
        total = llvm.alloca_once_value(builder, ir.Constant(numbers, None))
        with llvm.for_range(builder, terms, intp=index) as loop:
            k = loop.index
            address = builder.add(builder.load(builder.gep(of_term, [k])), arguments[5])
            integers = builder.load(builder.inttoptr(address, bytes_.as_pointer()), align=1)
            scale = builder.load(builder.gep(of_block, [builder.add(builder.mul(k, blocks), arguments[4])]))
            x = builder.fmul(builder.sitofp(integers, numbers), everywhere(scale))
            weighed = builder.fmul(everywhere(builder.load(builder.gep(of_weight, [k]))), x)
            builder.store(builder.fadd(builder.load(total), weighed), total)
        place = builder.bitcast(builder.gep(to, [arguments[5]]), numbers.as_pointer())
        builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(addresses, scales, weights, out, block, at), generate


sum_wide: Any = intrinsic(_sum_wide)
put_far: Any = intrinsic(_put_far)
as_bits: Any = intrinsic(_bitcast(_f32, _u32, ir.IntType(32)))
as_float: Any = intrinsic(_bitcast(_u32, _f32, ir.FloatType()))


@_kernel(types.boolean, _read(_f32))
def is_finite(x: F32) -> bool:
    top = np.uint32(0)
    for i in range(x.size):
        top = max(top, np.uint32(as_bits(x[i]) & MAGNITUDE))
    return bool(top < INFINITY)


@_kernel(types.void, _read(_f32), _f32, _write(_f32))
def add_fp32(x: F32, weight: np.float32, out: F32) -> None:
    for i in range(out.size):
        out[i] = np.float32(out[i] + np.float32(weight * x[i]))


@_kernel(types.boolean, _read(_f32), _write(_u16))
def to_bf16(x: F32, halves: U16) -> bool:
    """The upper halves of the bits, rounded to nearest even; false if there is NaN or infinity."""
    top = np.uint32(0)
    for i in range(x.size):
        bits = np.uint32(as_bits(x[i]))
        magnitude = np.uint32(bits & MAGNITUDE)
        top = max(top, magnitude)
        half = np.uint32((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16)
        half = min(half, LARGEST_BF16)
        halves[i] = np.uint16(half | ((bits >> 16) & 0x8000))
    return bool(top < INFINITY)


@_kernel(types.boolean, _read(_u16))
def is_finite_bf16(halves: U16) -> bool:
    top = np.uint16(0)
    for i in range(halves.size):
        top = max(top, np.uint16(halves[i] & 0x7FFF))
    return bool(top <= LARGEST_BF16)


@_kernel(_f32, _u16)
def _bf16(half: int) -> np.float32:
    """The number that a bf16's bits stand for."""
    return np.float32(as_float(np.uint32(np.uint32(half) << 16)))


@_kernel(types.void, _read(_u16), _write(_f32))
def from_bf16(halves: U16, out: F32) -> None:
    for i in range(out.size):
        out[i] = _bf16(halves[i])


@_kernel(types.void, _read(_u16), _f32, _write(_f32))
def add_bf16(halves: U16, weight: np.float32, out: F32) -> None:
    for i in range(out.size):
        x = as_float(np.uint32(np.uint32(halves[i]) << 16))
        out[i] = np.float32(out[i] + np.float32(weight * x))


@_kernel(types.boolean, _read(_f32), _int, _f32, _f32, _write(_f32))
def scales_of(x: F32, block: int, levels: np.float32, largest: np.float32, scales: F32) -> bool:
    """Write absmax / levels of each block, at most `largest`; false if there is NaN or infinity."""
    for b in range(scales.size):
        part = x[b * block : b * block + block]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, np.uint32(as_bits(part[i]) & MAGNITUDE))
        if top >= INFINITY:
            return False
        absmax = np.float32(as_float(top))
        scale = min(np.float32(absmax / levels), largest)
        # A subnormal scale may be rounded down by up to a half of itself, which would clip the block: round it up.
        if scale < SMALLEST_NORMAL and np.float32(scale * levels) < absmax:
            scale = as_float(np.uint32(as_bits(scale) + 1))
        scales[b] = scale
    return True


@_kernel(_f32, _u16)
def _share(half: int) -> np.float32:
    """fp16 bits in [0, 1] as fp32: exactly, as both products are powers of two."""
    return np.float32(as_float(np.uint32(np.uint32(half) << 13)) * HALF_SCALE)


@_kernel(_f32, _write(_f32), _write(_u16))
def to_shares(scales: F32, shares: U16) -> np.float32:
    """Scales as shares of the largest, which is returned, fp16 bits rounded up; `scales` become those that
    `from_shares` gives."""
    largest = ZERO
    for b in range(scales.size):
        largest = max(largest, scales[b])
    for b in range(scales.size):
        half = 0
        if scales[b] > ZERO:
            share = np.float32(scales[b] / largest)
            if share >= HALF_NORMAL:
                half = int((np.int64(as_bits(share)) - HALF_BIAS + 0x1FFF) >> 13)
            else:
                steps = np.float32(share * HALF_STEP)
                half = int(steps)
                if np.float32(half) < steps or half == 0:
                    half += 1
        shares[b] = half
    for b in range(scales.size):
        scales[b] = np.float32(largest * _share(shares[b]))
    return largest


@_kernel(types.boolean, _read(_u16), _f32, _write(_f32))
def from_shares(shares: U16, largest: np.float32, scales: F32) -> bool:
    """The scales; false if there is a share that is not in [0, 1], -0.0 included."""
    top = np.uint16(0)
    for b in range(scales.size):
        top = max(top, shares[b])
        scales[b] = np.float32(largest * _share(shares[b]))
    return bool(top <= ONE_SHARE)


@_kernel(_f32, _f32)
def _inverse(scale: np.float32) -> np.float32:
    """Of a scale of SMALL_SCALE or more; of a smaller one, what `x * LIFT` is to be multiplied by."""
    if scale >= SMALL_SCALE:
        return np.float32(ONE / scale)
    return np.float32(ONE / np.float32(scale * LIFT)) if scale > ZERO else ZERO


@_kernel(_u32, _f32, _f32)
def _rounded(x: np.float32, inverse: np.float32) -> np.uint32:
    """Bits whose low ones are those of the integer next to `x * inverse`."""
    return np.uint32(as_bits(np.float32(np.float32(x * inverse) + ROUNDING_SHIFT)))


@_kernel(_f32, _u8)
def _signed(byte: np.uint8) -> np.float32:
    """The signed number that a byte stands for."""
    return np.float32(np.int8(byte))


@_kernel(_f32, _u8)
def _low(byte: np.uint8) -> np.float32:
    """The signed number in the low four bits."""
    return np.float32(np.int8(np.uint8(byte << 4)) >> 4)


@_kernel(_f32, _u8)
def _high(byte: np.uint8) -> np.float32:
    return np.float32(np.int8(byte) >> 4)


@_kernel(types.void, _read(_f32), _int, _read(_f32), _write(_u8))
def to_int8(x: F32, block: int, scales: F32, values: U8) -> None:
    """Write each element as the integer next to its quotient by its block's scale, a byte in two's complement."""
    for b in range(scales.size):
        part, to = x[b * block : b * block + block], values[b * block : b * block + block]
        inverse = _inverse(scales[b])
        if scales[b] >= SMALL_SCALE:
            for i in range(part.size):
                to[i] = np.uint8(_rounded(part[i], inverse) & 255)
        else:
            for i in range(part.size):
                to[i] = np.uint8(_rounded(np.float32(part[i] * LIFT), inverse) & 255)


@_kernel(types.void, _read(_u8), _int, _read(_f32), _write(_f32))
def from_int8(values: U8, block: int, scales: F32, out: F32) -> None:
    """Decode each element: its integer times the scale of its block."""
    for b in range(scales.size):
        part, to, scale = values[b * block : b * block + block], out[b * block : b * block + block], scales[b]
        for i in range(part.size):
            to[i] = np.float32(_signed(part[i]) * scale)


@_kernel(types.void, _read(_u8), _int, _read(_f32), _write(_f32))
def from_int8_far(values: U8, block: int, scales: F32, out: F32) -> None:
    """Do what `from_int8` does, past the caches where `out` lies so that this is possible."""
    whole = out.size // block if block % STORE_ELEMENTS == 0 and out.ctypes.data % CACHE_LINE == 0 else 0  # blocks
    for b in range(whole):
        for i in range(b * block, b * block + block, STORE_ELEMENTS):
            put_far(values, scales[b], out, i)
    from_int8(values[whole * block :], block, scales[whole:], out[whole * block :])


@_kernel(types.float64, _read(_u8), _int, _read(_f32))
def square_int8(values: U8, block: int, scales: F32) -> float:
    """The sum of squares of the decoded elements: exact within a block, but for its scale, of which each element
    is a multiple."""
    total = 0.0
    for b in range(scales.size):
        part, square = values[b * block : b * block + block], np.int64(0)
        for i in range(part.size):
            q = np.int32(np.int8(part[i]))
            square += np.int64(q * q)
        total += np.float64(scales[b]) * np.float64(scales[b]) * np.float64(square)
    return total


@_kernel(types.void, _read(_u8), _int, _read(_f32), _f32, _write(_f32))
def add_int8(values: U8, block: int, scales: F32, weight: np.float32, out: F32) -> None:
    """Add each decoded element, times `weight`, to `out`; each operation is rounded once."""
    for b in range(scales.size):
        part, to, scale = values[b * block : b * block + block], out[b * block : b * block + block], scales[b]
        for i in range(part.size):
            to[i] = np.float32(to[i] + np.float32(weight * np.float32(_signed(part[i]) * scale)))


@_kernel(types.void, _read(_int), _int, types.Array(_f32, 2, "C", readonly=True), _read(_f32), _write(_f32))
def mean_int8(addresses: Addresses, block: int, scales: F32, weights: F32, out: F32) -> None:
    """Write the bits that `add_int8` makes of zeros and the integers at each address, in blocks of a multiple of
    REGISTER_ELEMENTS elements; in one go: `out` is written once."""
    for b in range(scales.shape[1]):
        for i in range(b * block, b * block + block, REGISTER_ELEMENTS):
            sum_wide(addresses, scales, weights, out, b, i)


@_kernel(types.void, _read(_f32), _int, _read(_f32), _write(_u8))
def to_int4(x: F32, block: int, scales: F32, values: U8) -> None:
    """Write each element as the integer next to its quotient by its block's scale, two a byte: those of a block's
    first half in the low bits, those of its second half in the high ones."""
    for b in range(scales.size):
        part, to = x[b * block : b * block + block], values[b * block >> 1 : b * block + block >> 1]
        inverse, lift = _inverse(scales[b]), ONE if scales[b] >= SMALL_SCALE else LIFT
        half = (part.size + 1) >> 1
        first, second = part[:half], part[half:]
        for i in range(first.size):
            to[i] = np.uint8(_rounded(np.float32(first[i] * lift), inverse) & 15)
        for i in range(second.size):
            to[i] |= np.uint8((_rounded(np.float32(second[i] * lift), inverse) & 15) << 4)


@_kernel(types.void, _read(_u8), _int, _read(_f32), _write(_f32))
def from_int4(values: U8, block: int, scales: F32, out: F32) -> None:
    """Decode each element: its integer times the scale of its block."""
    for b in range(scales.size):
        part, to = values[b * block >> 1 : b * block + block >> 1], out[b * block : b * block + block]
        scale = scales[b]
        half = (to.size + 1) >> 1
        first, second = to[:half], to[half:]
        for i in range(first.size):
            first[i] = np.float32(_low(part[i]) * scale)
        for i in range(second.size):
            second[i] = np.float32(_high(part[i]) * scale)


@_kernel(types.void, _read(_u8), _int, _read(_f32), _f32, _write(_f32))
def add_int4(values: U8, block: int, scales: F32, weight: np.float32, out: F32) -> None:
    """Add each decoded element, times `weight`, to `out`; each operation is rounded once."""
    for b in range(scales.size):
        part, to = values[b * block >> 1 : b * block + block >> 1], out[b * block : b * block + block]
        scale = scales[b]
        half = (to.size + 1) >> 1
        first, second = to[:half], to[half:]
        for i in range(first.size):
            first[i] = np.float32(first[i] + np.float32(weight * np.float32(_low(part[i]) * scale)))
        for i in range(second.size):
            second[i] = np.float32(second[i] + np.float32(weight * np.float32(_high(part[i]) * scale)))
