"""Keeps, of what was found by mutation, the shortest input of each kind: what is taken, and each reason for which
something is refused. `corpus` has them; `guided` begins with them, and every run of the tests looks at them.

    PYTHONPATH=tests:tests/tools python -m fuzz.keep DECODER FOLDER

FOLDER is what `fuzz.guided` was given, and wrote to. What is kept already stays.
"""

import re
import sys
from pathlib import Path

from fuzz import corpus
from fuzz.decoders import DECODERS, Decoder

MAX_BYTES = 600  # of an input that is kept
MAX_KINDS = 8  # of a decoder, that are added


def kind_of(decoder: Decoder, data: bytes) -> str:
    """What becomes of an input: the sentence of its refusal, whatever the numbers and names in it."""
    try:
        decoder.read(data)
    except decoder.refusals as error:
        sentence = re.sub(r"b?'[^']*'|\"[^\"]*\"|[-0-9.,]+", "#", str(error))
        return f"{type(error).__name__}: {sentence[:60]}"
    return "taken"


def main(name: str, folder: Path) -> None:
    """Add to the decoder's corpus what is of a new kind."""
    decoder, kept = DECODERS[name], corpus.inputs(name)
    known = {kind_of(decoder, data) for data in (*kept, *decoder.examples())}
    found = {data for path in folder.iterdir() if len(data := path.read_bytes()) <= MAX_BYTES}
    added = list[bytes]()
    for data in sorted(found, key=lambda data: (len(data), data)):
        if data and len(added) < MAX_KINDS and (kind := kind_of(decoder, data)) not in known:
            known.add(kind)
            added.append(data)
    corpus.keep(name, [*kept, *added])
    print(f"{name}: {len(kept)} inputs were kept, {len(added)} are added")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
