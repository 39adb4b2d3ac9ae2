"""Numbers with fewer digits, for records: what nobody needs to sixteen places takes fewer bytes without them."""

from math import frexp, isfinite, ldexp


def rounded(value: float, bits: int) -> float:
    """The number nearest to `value` with `bits` significant bits: 8 are 2.4 decimal digits, 16 are 4.8. What would
    be beyond the largest float is as it is, and so is what is not finite."""
    if not isfinite(value):
        return value
    mantissa, exponent = frexp(value)
    try:
        return ldexp(round(ldexp(mantissa, bits)), exponent - bits)
    except OverflowError:
        return value
