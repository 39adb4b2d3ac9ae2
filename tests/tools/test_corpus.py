"""The texts of packages as documents."""

import gzip
import json
from pathlib import Path

import corpus
import pytest
from tokenizers import Tokenizer

SENSE = "00001740 03 n 02 entity 0 living_thing 0 003 ~ 00001930 n 0000 | that which is perceived  \n"


def test_a_sense_is_its_words_and_what_they_mean() -> None:
    assert corpus.sense(SENSE) == "entity, living thing: that which is perceived."
    assert corpus.sense("  1 This software and database is being provided\n") == ""


def test_the_brown_corpus_is_set_as_in_print() -> None:
    tagged = "\n\tThe/at jury/nn said/vbd ``/`` no/rb ''/'' ,/, and/cc went/vbd ./.\n\n"
    tagged += "\tIt/pps and/or/cc he/pps ?/. ?/.\n"
    assert corpus.untagged(tagged) == 'The jury said " no ", and went.\nIt and/or he?'


def test_short_entries_are_put_together_and_none_is_lost() -> None:
    entries = [f"entry {i} " * 20 for i in range(100)]
    found = list(corpus.grouped(entries))
    assert "\n".join(found) == "\n".join(entries)
    assert all(len(text) >= corpus.DOCUMENT_CHARACTERS for text in found[:-1]) and len(found) > 3


def test_each_package_gives_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def debian(name: str, folder: Path) -> None:
        def put(path: str, data: bytes) -> None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

        match name:
            case "dict-gcide":
                put(
                    "usr/share/dictd/gcide.dict.dz",
                    gzip.compress(b"Abjure \\Ab\\\n   To renounce.\n\nAbjurer, n.\n"),
                )
            case "wordnet-base":
                put("usr/share/wordnet/data.noun", SENSE.encode())
            case "linux-doc":
                put("usr/share/doc/linux/Documentation/a.rst.gz", gzip.compress(b"=====\nTitle\n====="))
                put("usr/share/doc/linux/Documentation/translations/zh/a.rst.gz", gzip.compress(b"other"))
            case "perl-doc":
                put("usr/share/perl/pod/perl.pod", b"=head1 NAME\n")

    def npm(name: str, folder: Path) -> None:
        raise OSError("no npm here")

    monkeypatch.setattr(corpus, "fetch_debian", debian)
    monkeypatch.setattr(corpus, "fetch_npm", npm)
    texts = corpus.write_texts(tmp_path)
    found = {path.stem: [json.loads(line)["text"] for line in path.read_text().splitlines()] for path in texts}
    assert found == {
        "dict-gcide": ["Abjure \\Ab\\\n   To renounce.\nAbjurer, n.\n"],
        "wordnet-base": ["entity, living thing: that which is perceived."],
        "linux-doc": ["=====\nTitle\n====="],
        "perl-doc": ["=head1 NAME\n"],
    }
    corpus.train_tokenizer(texts, tmp_path / "tokenizer", 260)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 260 and tokenizer.token_to_id(corpus.END_OF_TEXT) == 0
    assert tokenizer.decode(tokenizer.encode("Abjure ü").ids) == "Abjure ü"
