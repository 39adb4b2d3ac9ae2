"""Decoders under atheris, which mutates their inputs towards code that none has reached (Google's Atheris, on
libFuzzer). `test_guided` runs it; so may a person, for longer:

    PYTHONPATH=tests python -m fuzz.guided DECODER[,DECODER...] FOLDER [libFuzzer's options, as -max_total_time=60]

One follows the other, each in a process of its own, forked when all is loaded: that takes longer than most
mutations. FOLDER/DECODER is for what it finds; the decoder's examples and its corpus are put there first. An input
that ends in another exception than the decoder's own ends the process, and is printed as a line for its corpus.
"""

import os
import sys
from pathlib import Path

import atheris

# Numba compiles the bytecode of these, which must be as it was written.
COMPILED = {"atoll.comm.codecs.kernels", "atoll.comm.codecs.sparse_kernels"}

with atheris.instrument_imports(include=["atoll"], exclude=COMPILED):
    from fuzz import corpus
    from fuzz.decoders import DECODERS, FAULTY, ODD


def main(names: list[str], folder: Path, options: list[str]) -> None:
    """Fuzz one after the other. Exits at the first that has a fault."""
    for name in names:
        if (child := os.fork()) == 0:
            fuzz(name, folder / name, options)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"{name} failed")


def fuzz(name: str, folder: Path, options: list[str]) -> None:
    """Mutate until an option's limit, or until a fault is found. Never returns."""
    decoder = FAULTY if name == "faulty" else DECODERS[name]
    folder.mkdir()
    for i, data in enumerate([*decoder.examples(), *corpus.inputs(name), *ODD]):
        (folder / f"seed-{i:04d}").write_bytes(data)

    def test_one_input(data: bytes) -> None:
        try:
            decoder.read(data)
        except decoder.refusals:
            pass
        except BaseException:
            print(f"for tests/fuzz/inputs/{name}.hex: {data.hex()}", file=sys.stderr)
            raise

    limits = ["-max_len=4096", "-timeout=30", "-rss_limit_mb=2048", "-malloc_limit_mb=256"]
    artifacts = f"-artifact_prefix={folder}/found-"
    atheris.Setup([sys.argv[0], *limits, artifacts, *options, str(folder)], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3:])
