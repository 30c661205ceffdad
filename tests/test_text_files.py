"""Text of any form becomes documents, once, and what is no text is named."""

import bz2
import errno
import functools
import gzip
import json
import lzma
import os

import pytest
import seqio
import tensorflow as tf
from convt5.tasks import pretraining, tables, text_files, vocabularies
from convt5.tasks.sources import TextFilesSource
from convt5.tasks.text_files import TextFiles

from convt5 import errors
from convt5.evaluation import inputs, task_data
from convt5.runtime import atomic_files, file_locks, folders, local_files

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


@pytest.mark.parametrize("start", ["", "\n\n", "\ufeff\n\n"])
def test_without_a_blank_line_each_line_is_a_document(tmp_path, start):
    path = write(tmp_path / "text.txt", f"{start}one\n\ttwo \r\nthree\n\n")
    assert list(TextFiles(path=path).documents()) == [b"one", b"\ttwo ", b"three"]


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


def test_files_that_are_missing_of_a_numbered_set_are_told(tmp_path):
    for name in ("a-00000-of-00003.jsonl", "a-00002-of-00003.jsonl.gz", "b-1-of-1.jsonl"):
        suffix = ".gz" if name.endswith(".gz") else ""
        write(tmp_path / name, '{"text": "one"}\n', suffix)
    path = str(tmp_path / "*.jsonl*")
    table = tables.TableSource(path, lambda row: {"text": row.text("text")})
    for told in (
        TextFiles(path=path).tally().faults(),
        table.tally("train").faults(),
        inputs.from_files(path).faults(),
    ):
        assert told == "1 files missing from numbered sets such as part-00000-of-00002"


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json"])
def test_json_lines_are_known_by_the_names_of_shards(tmp_path, ending):
    for number in range(2):
        write(tmp_path / f"rows.{ending}-{number:05d}-of-00002", json.dumps({"text": str(number)}))
    assert list(TextFiles(path=tmp_path).documents()) == [b"0", b"1"]


def test_another_key_of_json_lines_may_hold_the_text(tmp_path):
    number = "9" * 78  # As of 256 bits.
    path = write(tmp_path / "rows.jsonl", f'{{"body": "one", "text": {number}}}\n')
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


@pytest.mark.slow
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


def test_text_of_a_run_stays_what_it_was_when_the_run_began(tmp_path):
    write(tmp_path / "a.txt", "one\ntwo")
    source = TextFilesSource({"train": (TextFiles(path=tmp_path / "*.txt"), "train")})
    shards = source.list_shards("train")
    write(tmp_path / "a.txt", "three\nfour")
    write(tmp_path / "b.txt", "five")
    assert source.list_shards("train") == shards


def test_a_held_out_paragraph_is_divided_like_the_text_of_training(tmp_path):
    write(tmp_path / "train.txt", "First line.\nIts second.\n\nOther.")
    write(tmp_path / "rows.jsonl", '{"text": "a"}')
    write(tmp_path / "dev.txt", "A line.\nIts second.")
    write(tmp_path / "paragraphs.txt", "A line.\n\nOther.\nIts second.")
    for train, held_out, expected in (
        ("train.txt", "dev.txt", 1),
        ("dev.txt", "paragraphs.txt", 3),
        ("rows.jsonl", "dev.txt", 2),
        ("rows.jsonl", "paragraphs.txt", 2),
    ):
        task = pretraining.text_span_corruption(
            str(tmp_path / train), validation_path=str(tmp_path / held_out)
        )
        assert task.num_input_examples("validation") == expected


def test_text_is_not_opened_before_it_is_needed(tmp_path, monkeypatch):
    paths = [write(tmp_path / name, "a\n\nb") for name in ("train.txt", "dev.txt")]
    with monkeypatch.context() as patch:
        patch.setattr(local_files, "open_bytes", lambda name: pytest.fail(f"{name} was opened"))
        task = pretraining.text_span_corruption(paths[0], validation_path=paths[1])
    assert task.num_input_examples("validation") == 2


@pytest.mark.parametrize("lost", ["one file", "its end", "all files", "the record"])
def test_stored_text_that_lost_a_part_is_stored_again(tmp_path, cache, monkeypatch, lost):
    monkeypatch.setattr(text_files, "_SHARD_BYTES", 100)
    path = write(tmp_path / "text.txt", "\n".join(f"document {i}" for i in range(100)))
    files = TextFiles(path=path, holdout_every=5)
    stored = files.stored()
    expected = {split: read(names) for split, names in stored.items()}
    (folder,) = (cache / "convt5" / "text").iterdir()
    (record,) = folder.glob("*.json")
    shard = stored["validation"][1]
    if lost == "its end":  # As after a machine lost power: an empty file holds no record.
        open(shard, "wb").close()
    chosen = {"one file": [shard], "all files": folder.iterdir(), "the record": [record]}
    for each in chosen.get(lost, []):
        os.remove(each)
    assert {split: read(names) for split, names in files.stored().items()} == expected
    assert files.tally().documents == 100
    assert list((cache / "convt5" / "text").iterdir()) == [folder]


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


def test_what_a_kill_left_of_storing_is_removed_by_a_later_run(tmp_path, cache, monkeypatch):
    text = cache / "convt5" / "text"
    left, young, held = (text / f"unfinished-{name}" for name in ("left", "young", "held"))
    for folder in (left, young, held):
        folder.mkdir(parents=True)
        (folder / "train-00000.tfrecord").write_bytes(b"half")
    for path in (left, held, *left.iterdir(), *held.iterdir()):
        os.utime(path, (10**9, 10**9))
    files = TextFiles(path=write(tmp_path / "text.txt", "one\ntwo"))
    lock = os.open(held, os.O_RDONLY)
    assert file_locks.lock(lock)
    first = files.stored()
    assert {path.name for path in text.glob("unfinished-*")} == {young.name, held.name}
    os.close(lock)
    assert files.stored() == first
    assert list(text.glob("unfinished-*")) == [young]
    # While a process writes, however slow it is, its folder stays.
    write_all = TextFiles._write

    def write_slowly(files, folder):
        write_all(files, folder)
        for path in (folder, *folder.iterdir()):
            os.utime(path, (10**9, 10**9))
        atomic_files.remove_abandoned(folder.parent, "unfinished-*")

    monkeypatch.setattr(TextFiles, "_write", write_slowly)
    write(tmp_path / "text.txt", "one\ntwo\nthree")
    assert len(read(TextFiles(path=tmp_path / "text.txt").stored()["train"])) == 3


def test_a_path_that_matches_nothing_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "corpus.txt", "one")
    with pytest.raises(errors.UserError, match=r"matches no file.* Did you mean corpus\.txt"):
        TextFiles(path=str(tmp_path / "corpsu.txt"))


def test_a_folder_stands_for_the_files_in_it_and_below(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    write(folder / "a.txt", "one\n")
    write(folder / "deep" / "b.txt.gz", "two\n", ".gz")
    write(folder / "deep" / "c.jsonl", '{"text": "three"}\n')
    for hidden in (folder / ".a.txt.swp", folder / ".git" / "config"):
        hidden.write_bytes(b"\xff")
    for path in (str(folder), [folder], f"{folder}/"):
        assert list(TextFiles(path=path).documents()) == [b"one", b"two", b"three"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.UserError, match="is a folder without files"):
        TextFiles(path=str(tmp_path / "empty"))


def test_a_run_inside_the_folder_of_its_data_is_no_data(tmp_path):
    store = f"ram://{tmp_path.name}/data"
    for folder in (str(tmp_path), store):
        for name in ("train.jsonl", "run/metrics.jsonl", "run/config.gin", "run/checkpoints/1/a"):
            tf.io.gfile.makedirs(os.path.dirname(f"{folder}/{name}"))
            with tf.io.gfile.GFile(f"{folder}/{name}", "w") as file:
                file.write("{}")
        assert local_files.find(folder) == [f"{folder}/train.jsonl"]
        assert tables.find_splits(folder) == {"train": [f"{folder}/train.jsonl"]}
        assert local_files.find(f"{folder}/run/*.jsonl") == [f"{folder}/run/metrics.jsonl"]
        assert f"{folder}/run/metrics.jsonl" in local_files.find(f"{folder}/run")


@pytest.mark.parametrize("read", [tables.read_rows, lambda path: TextFiles(path=path).documents()])
@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_lines_that_end_in_carriage_returns_alone_are_no_single_line(tmp_path, suffix, read):
    path = write(tmp_path / f"rows{suffix}", "text\rone\rtwo\r")
    with pytest.raises(errors.UserError, match=r"rows.* no line feed, .*convert it \(tr"):
        list(read(path))
    assert list(local_files.text_lines([b"text\r"], path)) == ["text\r"]


def test_a_folder_of_a_store_stands_for_what_a_local_one_does(tmp_path):
    store = f"ram://{tmp_path.name}/rows"
    for name in ("train.jsonl", "dev.jsonl", "test/a.jsonl", ".train.jsonl.swp", "notes.md"):
        tf.io.gfile.makedirs(os.path.dirname(f"{store}/{name}"))
        with tf.io.gfile.GFile(f"{store}/{name}", "w") as file:
            file.write("{}")
    files = {
        "validation": [f"{store}/dev.jsonl"],
        "test": [f"{store}/test/a.jsonl"],
        "train": [f"{store}/train.jsonl"],
    }
    for path in (store, f"{store}/"):
        assert list(tables.find_splits(path).items()) == list(files.items())
    with pytest.raises(errors.UserError, match=r"rows/\*\*': .*\*\* does not match folders of any"):
        local_files.find(f"{store}/**")


def test_links_to_folders_are_followed_and_loops_end(tmp_path):
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for each, name in ((folder, "train"), (elsewhere, "more")):
        each.mkdir()
        write(each / f"{name}.jsonl", json.dumps({"text": name}))
    (folder / "dev").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (elsewhere / "back").symlink_to(folder)
    assert list(TextFiles(path=folder).documents()) == [b"more", b"train"]
    files = {"train": [f"{folder}/train.jsonl"], "validation": [f"{folder}/dev/more.jsonl"]}
    assert tables.find_splits(folder) == files
    assert local_files.find(elsewhere) == [
        f"{elsewhere}/back/train.jsonl",
        f"{elsewhere}/more.jsonl",
    ]


@pytest.mark.parametrize("read", [local_files.find, tables.find_splits])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, read):
    (tmp_path / "closed").mkdir()
    write(tmp_path / "train.jsonl", "{}")
    scandir = os.scandir

    def scan(path):
        if os.path.basename(os.path.normpath(path)) == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(errors.UserError, match=r"closed' cannot be read \(Permission denied\); "):
        read(tmp_path)
    for pattern in ("**", "**/*.jsonl", "*/*.jsonl", "clo*/../[c]*/*"):
        with pytest.raises(errors.UserError, match=r"closed/', which cannot be read \(Permission"):
            read(tmp_path / pattern)
    assert local_files.find(tmp_path / "*.jsonl") == [f"{tmp_path}/train.jsonl"]


@pytest.mark.parametrize("pattern", ["", "*", "train.jsonl*"])
@pytest.mark.parametrize("read", [local_files.find, tables.find_splits])
def test_a_file_beside_its_compressed_copy_is_refused(tmp_path, read, pattern):
    for suffix in ("", ".gz"):
        write(tmp_path / f"train.jsonl{suffix}", "{}", suffix)
    with pytest.raises(errors.UserError, match=r"train\.jsonl' and .*\.jsonl\.gz' .* read twice"):
        read(tmp_path / pattern)


@pytest.mark.parametrize(
    "other", ["train.jsonl", "train-0-of-1.jsonl", "train-00000-of-00002.jsonl"]
)
@pytest.mark.parametrize("read", [local_files.find, tables.find_splits])
def test_numbered_files_beside_those_of_another_set_are_refused(tmp_path, read, other):
    for name in ("train-0-of-2.jsonl", "train-1-of-2.jsonl.gz", "other-0-of-3.jsonl"):
        (tmp_path / name).touch()
    read(tmp_path)
    (tmp_path / other).touch()
    for pattern in ("", "train*"):
        with pytest.raises(errors.UserError, match=r"hold the same rows .*read twice; remove"):
            read(tmp_path / pattern)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("pattern", ["", "*", "train.jsonl"])
@pytest.mark.parametrize("read", [local_files.find, tables.find_splits])
def test_what_is_no_regular_file_is_named(tmp_path, read, pattern, kind):
    path = tmp_path / "train.jsonl"
    path.symlink_to("absent") if kind == "link" else os.mkfifo(path)
    with pytest.raises(errors.UserError, match=rf"train\.jsonl' is a {kind}, not a regular file"):
        read(tmp_path / pattern)


@pytest.mark.parametrize("scheme", ["https", "hdfs", "ftp", "s3"])
def test_a_url_that_cannot_be_read_is_named(scheme):
    with pytest.raises(errors.UserError, match=rf"'{scheme}://.*cannot be listed.* copy the files"):
        TextFiles(path=f"{scheme}://example.org/text.txt")


def test_a_path_in_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(errors.UserError, match="matches no file"):
        TextFiles(path=tmp_path / "text.txt")


@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_files_without_a_document_are_an_error(tmp_path, text):
    path = write(tmp_path / "empty.txt", text)
    with pytest.raises(errors.UserError, match=r"empty\.txt' holds no document"):
        TextFiles(path=path).stored()


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00\x01\n")
    with pytest.raises(errors.UserError, match=r"image\.txt', line 1 is not UTF-8"):
        TextFiles(path=str(tmp_path / "image.txt")).stored()


@pytest.mark.parametrize(
    ("encoding", "mark", "named"),
    [
        ("utf-16-le", "\ufeff", "iconv -f utf-16 -t utf-8"),
        ("utf-16-be", "\ufeff", "iconv -f utf-16 -t utf-8"),
        ("utf-16-le", "", "iconv -f utf-16le -t utf-8"),
        ("utf-16-be", "", "iconv -f utf-16be -t utf-8"),
        ("latin1", "", "iconv -f latin1 -t utf-8"),
    ],
)
def test_the_encoding_of_text_that_is_no_utf_8_is_guessed(tmp_path, encoding, mark, named):
    for name, text in (
        ("rows.csv", "text\nnaïve\n"),
        ("rows.tsv", "text\nnaïve\n"),
        ("rows.jsonl", '{"text": "naïve"}\n'),
    ):
        path = tmp_path / name
        path.write_bytes(f"{mark}{text}".encode(encoding))
        for read in (
            TextFiles(path=path).check,
            lambda path=path: [*tables.read_rows(str(path))],
            lambda path=path: inputs.from_files(str(path)),
        ):
            with pytest.raises(errors.UserError, match=rf"{name}', line . is not .*\({named}\)"):
                read()


@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.csv"])
def test_text_with_a_nul_for_every_letter_is_not_utf_8(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"one\nt\0w\0o\0\nthree\na\0 sparse nul \xff\n")

    def read(policy):
        if name == "a.txt":
            return [d.decode() for d in TextFiles(path=path, invalid_utf8=policy).documents()]
        rows = tables.read_rows(str(path), ["one"], invalid_utf8=policy)
        return ["one", *(row.text("one") for row in rows)]

    fault = rf"{name}', line 2 is not UTF-8 \(byte 0x00 after 't'\); .* \(tr -d '.000'\)"
    with pytest.raises(errors.UserError, match=fault):
        read("refuse")
    assert read("replace") == ["one", "t\ufffdw\ufffdo\ufffd", "three", "a\0 sparse nul \ufffd"]
    assert read("skip") == ["one", "three"]


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


@pytest.mark.parametrize("suffix", [".json", ".ndjson", ".ndjson.gz", ".json.xz"])
def test_json_lines_go_by_other_names_too(tmp_path, suffix):
    compression = suffix[suffix.rindex(".") :]
    compression = compression if compression in OPENERS else ""
    path = write(tmp_path / f"rows{suffix}", '{"text": "one"}\n{"text": "two"}\n', compression)
    assert list(TextFiles(path=path).documents()) == [b"one", b"two"]


def test_a_json_document_of_several_lines_is_refused(tmp_path):
    path = write(tmp_path / "rows.json", json.dumps([{"text": "one"}], indent=2))
    with pytest.raises(errors.UserError, match=r"rows\.json', line 1 is not JSON"):
        list(TextFiles(path=path).documents())


@pytest.mark.parametrize("compression", [gzip, lzma, bz2])
def test_damaged_archives_are_named(tmp_path, compression):
    path = tmp_path / {gzip: "a.txt.gz", lzma: "a.txt.xz", bz2: "a.txt.bz2"}[compression]
    whole = compression.compress(b"one\ntwo\n")
    no_block = whole[:10] + b"\xff" + whole[11:]
    damaged = (whole[: len(whole) // 2], b"plain", no_block)
    for content in (*damaged, *(whole + part for part in damaged), whole + b"plain" + whole):
        path.write_bytes(content)
        with pytest.raises(errors.UserError, match=r"a\.txt\.\w+' cannot be read"):
            list(TextFiles(path=str(path)).documents())


@pytest.mark.parametrize("padding", [b"", b"\0" * 4, b"\0" * 20_000])
@pytest.mark.parametrize("compression", [gzip, lzma, bz2])
def test_streams_one_behind_another_are_all_read(tmp_path, compression, padding):
    path = tmp_path / {gzip: "a.txt.gz", lzma: "a.txt.xz", bz2: "a.txt.bz2"}[compression]
    pages = [f"{page} {'word ' * 20_000}end" for page in range(3)]
    packed = [compression.compress(f"{page}\n".encode()) for page in pages]
    path.write_bytes(padding.join(packed) + padding)
    found = [document.decode() for document in TextFiles(path=str(path)).documents()]
    assert found == pages


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"text": "half \ud83d tail"}', r"line 2 holds half of a character"),
        ('{"text": "one", "text": "two"}', r"line 2 is not JSON \('text' is there twice\)"),
        ("[" * 100_000, r"line 2 is not JSON"),
        ('{"text": ' + "9" * 5000 + "}", r"line 2 is not JSON"),
    ],
)
def test_json_that_stands_for_no_text_is_named_by_its_line(tmp_path, line, message):
    path = write(tmp_path / "rows.jsonl", f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(errors.UserError, match=rf"rows\.jsonl', {message}"):
        list(TextFiles(path=path).documents())


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "text.txt", "one\n")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    with pytest.raises(errors.UserError, match=r"/proc/nothing/.* cannot be written.*XDG_CACHE_HO"):
        TextFiles(path=path).stored()


def test_a_cache_needs_a_home(tmp_path, monkeypatch):
    path = write(tmp_path / "text.txt", "one\n")
    monkeypatch.setattr(folders, "user_cache", lambda: None)
    with pytest.raises(errors.UserError, match="this user has no home folder; set XDG_CACHE_HOME"):
        TextFiles(path=path).stored()


def test_a_damaged_cache_is_named_when_it_is_evaluated(tmp_path, cache):
    path = write(tmp_path / "text.txt", "\n".join(f"document {i}" for i in range(100)))
    task = seqio.Task(
        "text",
        source=TextFilesSource({"train": (TextFiles(path=path), "train")}),
        preprocessors=[
            functools.partial(
                seqio.preprocessors.rekey, key_map={"inputs": "text", "targets": "text"}
            ),
            seqio.preprocessors.tokenize,
        ],
        output_features=dict.fromkeys(
            ["inputs", "targets"], seqio.Feature(vocabularies.characters(), add_eos=False)
        ),
    )
    lengths = {"inputs": 16, "targets": 16}
    assert len(task_data.read_examples(task, "train", lengths=lengths)) == 100
    for stored in cache.rglob("*.tfrecord"):
        content = stored.read_bytes()
        stored.write_bytes(content[:-9] + bytes(9))
    message = r"split=train of task=text cannot be read: .* may be truncated"
    with pytest.raises(errors.UserError, match=message):
        task_data.read_examples(task, "train", lengths=lengths)


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path):
    one = write(tmp_path / "a[1].txt", "one\n")
    write(tmp_path / "a1.txt", "other\n")
    assert list(TextFiles(path=one).documents()) == [b"one"]
    assert list(TextFiles(path=str(tmp_path / "a[1-9].txt")).documents()) == [b"other"]


def test_a_path_may_be_an_object(tmp_path):
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "b.txt", "two\n")
    assert list(TextFiles(path=tmp_path / "a.txt").documents()) == [b"one"]
    both = TextFiles(path=[tmp_path / "a.txt", tmp_path / "b.txt"])
    assert list(both.documents()) == [b"one", b"two"]


def test_a_file_is_read_once_however_often_it_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "one\ntwo\n")
    write(tmp_path / "b.txt", "three\n")
    (tmp_path / "._a.txt").write_bytes(b"\0\5\x16\7")
    monkeypatch.chdir(tmp_path)
    paths = ["a.txt", f"{tmp_path}/*.txt", "./b.txt"]
    assert list(TextFiles(path=paths).documents()) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("read", [local_files.find, lambda path: tables.find_splits(path)["train"]])
def test_a_file_is_read_once_however_many_links_lead_to_it(tmp_path, read):
    folder = tmp_path / "train"
    folder.mkdir()
    file = write(folder / "a.jsonl", "{}")
    (folder / "latest.jsonl").symlink_to("a.jsonl")
    (folder / "again").symlink_to(folder)
    assert read(tmp_path) == [file]


@pytest.mark.parametrize("name", ["text.tar", "text.tar.gz", "TEXT.TAR.XZ"])
def test_an_archive_of_files_is_no_text(tmp_path, name):
    (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(errors.UserError, match=rf"{name}' is an archive .*tar -xf"):
            TextFiles(path=path)


def test_capitals_in_a_name_mean_the_same(tmp_path, cache):
    path = tmp_path / "a.TXT.GZ"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert list(TextFiles(path=str(path)).documents()) == [b"one", b"two"]
    path = tmp_path / "A.JSONL"
    path.write_text('{"text": "one"}\n')
    (documents,) = read(TextFiles(path=str(path)).stored()["train"])
    assert documents == b"one"


def test_other_compressions_are_told_which_are_read(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\x01")
    with pytest.raises(errors.UserError, match=r"is not UTF-8 .* end in \.gz, \.xz, \.bz2"):
        list(TextFiles(path=str(tmp_path / "a.txt.zst")).documents())


LINES = [
    "def f():",
    "    return 1",
    "\tx = 2  ",
    "a\rb",
    "page\fbreak",
    "u\u2028v\u0085w",
    "nul\0nul",
    "long " * 100_000,
]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", OPENERS)
@pytest.mark.parametrize("separator", ["line", "blank_line"])
def test_text_is_what_is_in_the_file(tmp_path, suffix, end, separator):
    content = f"\ufeff{end}{end.join(LINES)}{end} {end}last".encode()
    path = tmp_path / f"text.txt{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write(content)
    found = [d.decode() for d in TextFiles(path=path, separator=separator).documents()]
    assert found == ([*LINES, "last"] if separator == "line" else ["\n".join(LINES), "last"])


def test_text_of_json_is_what_is_in_the_file(tmp_path):
    rows = "".join(json.dumps({"text": line}) + "\r\n" for line in LINES)
    (tmp_path / "rows.jsonl").write_bytes(f"\ufeff{rows}".encode())
    found = [d.decode() for d in TextFiles(path=tmp_path / "rows.jsonl").documents()]
    assert found == LINES


LATIN = "eins\nzwei für\ndrei\n\nvier\n".encode("latin1")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"separator": "line"}, ["eins", "zwei f\ufffdr", "drei", "vier"]),
        ({"separator": "blank_line"}, ["eins\nzwei f\ufffdr\ndrei", "vier"]),
    ],
)
def test_bytes_that_are_no_utf_8_are_refused_replaced_or_skipped(
    tmp_path, settings, expected, caplog
):
    path = tmp_path / "latin.txt"
    path.write_bytes(LATIN)
    with pytest.raises(
        errors.UserError, match=r"latin\.txt', line 2 is not UTF-8 \(byte 0xfc after 'zwei f'\)"
    ):
        TextFiles(path=path, **settings).stored()
    replaced = TextFiles(path=path, invalid_utf8="replace", **settings)
    skipped = TextFiles(path=path, invalid_utf8="skip", **settings)
    assert [d.decode() for d in replaced.documents()] == expected
    assert [d.decode() for d in skipped.documents()] == [d for d in expected if "\ufffd" not in d]
    for told in ("with bytes that are no UTF-8, which were replaced", "left out for bytes"):
        assert caplog.text.count(f": 1 documents {told}") == 1
    assert (replaced.tally().replaced, skipped.tally().skipped) == (1, 1)
    assert skipped.tally().documents == len(expected) - 1
    assert replaced.fingerprint() != skipped.fingerprint()
    with pytest.raises(errors.UserError, match="invalid_utf8='ignore' must be"):
        pretraining.text_span_corruption(str(path), invalid_utf8="ignore")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.tsv", "rows.csv"])
def test_rows_of_tables_with_bytes_that_are_no_utf_8_are_dealt_with_alike(tmp_path, name):
    lines = ["a\tb", "1\tf\xfcr", "2\tx\ry\u0085z"]
    if name == "rows.jsonl":
        lines = [json.dumps(dict(zip("ab", line.split("\t"), strict=True)), ensure_ascii=False)
                 for line in lines[1:]]  # fmt: skip
    elif name == "rows.csv":
        lines = [",".join(f'"{cell}"' for cell in line.split("\t")) for line in lines]
    head, last = "\r\n".join(lines[:-1]), lines[-1]
    content = head.encode("latin1") + b"\r\n" + f"{last}\r\n".encode()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)

    def read(policy):
        tally = local_files.Tally()
        rows = tables.read_rows(str(tmp_path / name), invalid_utf8=policy, tally=tally)
        return [tuple(row.values.values()) for row in rows], tally

    whole = ("2", "x\ry\u0085z")
    number = 1 if name == "rows.jsonl" else 2
    with pytest.raises(errors.UserError, match=rf"{name}', line {number} is not UTF-8"):
        read("refuse")
    assert read("replace")[0] == [("1", "f\ufffdr"), whole]
    assert read("skip")[0] == [whole]
    assert (read("replace")[1].replaced, read("skip")[1].skipped) == (1, 1)


def test_empty_files_are_counted(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "a.txt", "")
    write(folder / "b.txt", " \n\n")
    write(folder / "c.txt", "one\n  \ntwo\n")
    write(folder / "d.jsonl", "")
    files = TextFiles(path=folder)
    assert list(files.documents()) == [b"one", b"two"]
    found = files.tally()
    assert (found.files, found.empty_files, found.documents, found.text_bytes) == (4, 3, 2, 6)
    assert found.faults() == "3 empty files"


def test_the_first_documents_of_each_file_are_checked_without_storing(tmp_path, cache):
    write(tmp_path / "a.jsonl", '{"text": "one"}\n' * 30 + '{"body": "late"}\n')
    TextFiles(path=tmp_path / "a.jsonl").check()
    write(tmp_path / "b.jsonl", '{"body": "one"}\n')
    with pytest.raises(errors.UserError, match=r"b\.jsonl', line 1 has no string under text_key"):
        TextFiles(path=str(tmp_path / "*.jsonl")).check()
    assert not cache.exists()
