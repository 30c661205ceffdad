"""Text of any form becomes documents, once, and what is no text is named."""

import bz2
import gzip
import json
import lzma
import os

import pytest
import tensorflow as tf
from convt5.tasks import text_files
from convt5.tasks.text_files import TextFiles

from convt5 import errors

PARAGRAPHS = "First line.\nIts second line.\n\n\nOther document.\n \nThird.\n"
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path, text, suffix=""):
    with OPENERS[suffix](path, "wt", encoding="utf-8") as file:
        file.write(text)
    return str(path)


def read(names):
    return [record.numpy() for record in tf.data.TFRecordDataset(names)]


@pytest.mark.parametrize("suffix", OPENERS)
def test_blank_lines_separate_documents_in_any_compression(tmp_path, suffix):
    path = write(tmp_path / f"text.txt{suffix}", PARAGRAPHS, suffix)
    documents = list(TextFiles(path=path).documents())
    assert documents == [b"First line.\nIts second line.", b"Other document.", b"Third."]


def test_without_a_blank_line_each_line_is_a_document(tmp_path):
    path = write(tmp_path / "text.txt", "one\ntwo \r\nthree\n\n")
    assert list(TextFiles(path=path).documents()) == [b"one", b"two", b"three"]


def test_the_separator_may_be_set(tmp_path):
    path = write(tmp_path / "text.txt", "one\ntwo\n\nthree")
    lines = TextFiles(path=path, separator="line")
    groups = TextFiles(path=path, separator="blank_line")
    assert list(lines.documents()) == [b"one", b"two", b"three"]
    assert list(groups.documents()) == [b"one\ntwo", b"three"]


@pytest.mark.parametrize("suffix", OPENERS)
def test_json_lines_hold_a_document_each(tmp_path, suffix):
    rows = [{"text": "one\n\nstill one"}, {"text": "  "}, {"text": "naïve"}]
    text = "\n".join(json.dumps(row) for row in rows)
    path = write(tmp_path / f"rows.jsonl{suffix}", text, suffix)
    documents = list(TextFiles(path=path).documents())
    assert documents == [b"one\n\nstill one", "naïve".encode()]


def test_another_key_of_json_lines_may_hold_the_text(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"body": "one", "text": 3}\n')
    assert list(TextFiles(path=path, text_key="body").documents()) == [b"one"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "text.txt").write_bytes("\ufeffone".encode())
    assert list(TextFiles(path=str(tmp_path / "text.txt")).documents()) == [b"one"]


def test_globs_and_lists_of_paths_are_read_in_order(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    b = write(tmp_path / "b.txt", "two\n")
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "deep" / "er" / "c.txt", "three\n")
    assert list(TextFiles(path=str(tmp_path / "*.txt")).documents()) == [b"one", b"two"]
    both = TextFiles(path=[b, str(tmp_path / "**" / "c.txt")])
    assert list(both.documents()) == [b"two", b"three"]


def test_storing_keeps_each_document_once(tmp_path):
    documents = [f"document {i}" for i in range(200)]
    path = write(tmp_path / "text.txt", "\n".join(documents))
    stored = TextFiles(path=path).stored()
    assert sorted(read(stored["train"])) == sorted(text.encode() for text in documents)
    assert read(stored["train"]) != [text.encode() for text in documents]
    assert stored["validation"] == []


def test_much_text_is_stored_in_many_files_of_equal_numbers_of_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_SHARD_BYTES", 10)
    path = write(tmp_path / "text.txt", "\n".join(str(i) for i in range(1000)))
    stored = TextFiles(path=path).stored()["train"]
    assert len(stored) == 64
    assert {len(read([name])) for name in stored} == {15, 16}


def test_held_out_documents_are_not_trained_on(tmp_path):
    path = write(tmp_path / "text.txt", "\n".join(str(i) for i in range(100)))
    stored = TextFiles(path=path, holdout_every=10).stored()
    train, validation = set(read(stored["train"])), set(read(stored["validation"]))
    assert len(validation) == 10
    assert len(train) == 90
    assert not train & validation


def test_text_is_stored_once_and_again_when_a_file_changes(tmp_path, cache):
    path = write(tmp_path / "text.txt", "one\ntwo")
    files = TextFiles(path=path)
    first = files.stored()
    times = [os.stat(name).st_mtime_ns for name in first["train"]]
    assert [os.stat(name).st_mtime_ns for name in files.stored()["train"]] == times
    write(tmp_path / "text.txt", "one\ntwo\nthree")
    assert len(read(TextFiles(path=path).stored()["train"])) == 3
    assert len(list((cache / "convt5" / "text").iterdir())) == 2


def test_stored_text_is_the_same_for_every_host(tmp_path, monkeypatch):
    path = write(tmp_path / "text.txt", "\n".join(str(i) for i in range(300)))
    first = read(TextFiles(path=path).stored()["train"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other_host"))
    assert read(TextFiles(path=path).stored()["train"]) == first


def test_documents_stay_complete_when_they_exceed_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 500)
    documents = [f"document {i}" for i in range(300)]
    path = write(tmp_path / "text.txt", "\n".join(documents))
    stored = read(TextFiles(path=path).stored()["train"])
    assert sorted(stored) == sorted(text.encode() for text in documents)


def test_an_interrupted_store_leaves_nothing_that_counts(tmp_path, cache):
    path = write(tmp_path / "rows.jsonl", '{"text": "one"}\nbroken\n')
    for _ in range(2):
        with pytest.raises(errors.UserError, match="line 2"):
            TextFiles(path=path).stored()
    assert list((cache / "convt5" / "text").iterdir()) == []


def test_a_path_that_matches_nothing_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "corpus.txt", "one")
    with pytest.raises(errors.UserError, match=r"matches no file.* Did you mean corpus\.txt"):
        TextFiles(path=str(tmp_path / "corpsu.txt"))


def test_a_folder_is_answered_with_a_glob(tmp_path):
    with pytest.raises(errors.UserError, match=r"is a folder; set it to .*\*\.txt"):
        TextFiles(path=str(tmp_path))


@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_files_without_a_document_are_an_error(tmp_path, text):
    path = write(tmp_path / "empty.txt", text)
    with pytest.raises(errors.UserError, match=r"empty\.txt' holds no document"):
        TextFiles(path=path).stored()


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00\x01\n")
    with pytest.raises(errors.UserError, match=r"image\.txt' is not UTF-8"):
        TextFiles(path=str(tmp_path / "image.txt")).stored()


def test_a_cut_off_archive_is_named(tmp_path):
    whole = gzip.compress(b"one\ntwo\n" * 1000)
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.UserError, match=r"cut\.txt\.gz' cannot be read"):
        TextFiles(path=str(tmp_path / "cut.txt.gz")).stored()


def test_a_line_without_the_text_key_is_named_with_its_keys(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(errors.UserError, match=r"line 2 has no string under .*keys are \['body'\]"):
        list(TextFiles(path=path).documents())


def test_an_unknown_separator_is_an_error(tmp_path):
    path = write(tmp_path / "text.txt", "one")
    with pytest.raises(errors.UserError, match="separator='tab' must be"):
        TextFiles(path=path, separator="tab")
