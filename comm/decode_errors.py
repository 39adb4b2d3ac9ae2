"""The errors of msgspec's decoders, for who reads bytes that came from elsewhere.

Besides its own ones a decoder raises `UnicodeDecodeError` for text that is no UTF-8, and `RecursionError` for
brackets within brackets, deeper than the interpreter's stack.
"""

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
