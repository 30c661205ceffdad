"""Predictions of texts: every line answered once, in order, however often the command is killed."""

import bz2
import contextlib
import fcntl
import gzip
import io
import json
import lzma
import os
import re
import shutil

import pytest
import seqio
import tensorflow as tf
import tiny_run
import word_pieces
from convt5.tasks import synthetic, vocabularies

from convt5 import infer
from convt5.errors import UserError
from convt5.evaluation import infer_command, inputs, stream
from convt5.evaluation.inputs import Item
from convt5.evaluation.predictor import Prediction
from convt5.evaluation.results import Outcome, Results, ResumableLines
from convt5.evaluation.settings import PredictConfig
from convt5.interchange import loading, portable
from convt5.modeling.tree_paths import named_leaves
from convt5.text import task_format, vocabulary_files
from convt5.training.run_log import read_records

TEXTS = ["one", "two", "", "three é", "four"]
WRITTEN = [text for text in TEXTS if text]


class Echo:
    """Stands for a predictor: answers with the text itself and its number."""

    config = PredictConfig(batch_size=2)

    def __init__(self):
        self.computed = []

    def encode(self, text):
        return [text]

    def predict_tokens(self, sources, *, first_number, rows):
        self.computed += [text for (text,) in sources]
        return [
            Prediction((text.upper(),), (-float(first_number + i),), ((3, 1),))
            for i, (text,) in enumerate(sources)
        ]

    def predict(self, texts, *, first_number):
        return self.predict_tokens([[t] for t in texts], first_number=first_number, rows=None)


def items(texts):
    return iter([Item(text) for text in texts])


def write_all(path, texts, predictor=None, **settings) -> Echo:
    predictor = predictor or Echo()
    with contextlib.closing(ResumableLines(path, settings)) as lines:
        for records in stream.predictions(predictor, items(texts), chunk_size=4, done=lines.done()):
            lines.write(records)
    return predictor


@pytest.fixture(scope="module")
def task():
    tiny_run.add_task("tiny_infer")
    return "tiny_infer"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, task):
    return tiny_run.write_run(tmp_path_factory.mktemp("run"), steps=(20,), task=task)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl"])
def test_files_are_read_by_their_kind(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    lines = [json.dumps({"id": 3, "text": t}) if "json" in suffix else t for t in WRITTEN]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    read = inputs.from_files(str(path))
    assert [item.text for item in read.read()] == WRITTEN
    assert read.total == 4


def test_lines_that_end_in_carriage_returns_alone_are_no_single_input(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"one\rtwo\r")
    with pytest.raises(UserError, match=r"in\.txt' has carriage returns and no line feed"):
        inputs.from_files(str(tmp_path / "in.txt"))
    with pytest.raises(UserError, match="standard input' has carriage returns"):
        list(inputs.from_stream([b"one\rtwo"]).read())


def test_windows_line_ends_and_a_missing_last_one_are_no_text(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"one\r\ntwo")
    assert [i.text for i in inputs.from_files(str(tmp_path / "in.txt")).read()] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "field", "message"),
    [
        ("in.txt", b"one\n\ntwo\n", None, r"line 2 is empty"),
        ("in.txt", b"one\n\xff\n", None, r"line 2 is not UTF-8"),
        ("in.jsonl", b'{"text": "one"}\nnonsense\n', None, r"line 2 is not JSON"),
        ("in.jsonl", b'{"text": "one"}\n\nnonsense\n', None, r"line 3 is not JSON"),
        ("in.jsonl", b'{"text": "one"}\n["two"]\n', None, r"line 2 is no JSON object"),
        ("in.jsonl", b'{"text": "one"}\n{"text": ""}\n', None, r"line 2 is empty"),
        ("in.jsonl", b'{"text": 1}\n', None, r"line 1 has 1 in the field 'text'.* must be text"),
        ("in.jsonl", b'{"texts": "one"}\n', "text", r"no field .*--field\. Did you mean texts\?$"),
        ("in.jsonl", b'{"body": "one"}\n', None, r"has no field .*\['body'\]; name .* --field"),
        ("in.jsonl", b'{"text": "\\ud800"}\n', None, r"line 1 is not UTF-8"),
        ("in.txt", b"one\n", "text", r"line 1 is not JSON"),
    ],
)
def test_faulty_lines_are_named_before_anything_is_predicted(
    tmp_path, name, content, field, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        inputs.from_files(str(tmp_path / name), field)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("replace", ["one", "f\ufffdr", "  two", "three"]), ("skip", ["one", "  two", "three"])],
)
def test_a_folder_is_its_files_and_bytes_that_are_no_utf_8_are_dealt_with_as_in_training(
    tmp_path, policy, expected, capsys
):
    folder = tmp_path / "in"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_bytes("one\nfür\n  two".encode("latin1"))
    (folder / "below" / "b.jsonl").write_text('\n{"text": "three"}\n')
    (folder / "c.txt").write_text("")
    (folder / ".hidden").write_text("no text\n")
    with pytest.raises(UserError, match=r"in/a\.txt', line 2 is not UTF-8.* invalid_utf8"):
        inputs.from_files(str(folder))
    found = inputs.from_files(str(folder), invalid_utf8=policy)
    for _ in range(2):
        assert [item.text for item in found.read()] == expected
    assert found.total == len(expected)
    infer_command._tell_faults(found)
    told = capsys.readouterr().err
    assert "1 empty files" in told
    assert f"1 documents {'left out' if policy == 'skip' else 'with bytes'}" in told
    lines = io.BytesIO((folder / "a.txt").read_bytes())
    stream_of = inputs.from_stream(lines, invalid_utf8=policy)
    assert [item.text for item in stream_of.read()] == expected[:-1]
    assert stream_of.faults()


@pytest.mark.parametrize(
    ("fields", "given"),
    [(("text",), "  a, film"), (("text", "note"), {"text": "  a, film", "note": "5"})],
)
@pytest.mark.parametrize("name", ["in.csv", "in.tsv.gz"])
def test_tables_are_read_as_in_training(tmp_path, name, fields, given):
    rows = [["id", "text", "note"], ["7", "  a, film", "5"]]
    text = "\n".join("\t".join(row) for row in rows)
    if "csv" in name:
        text = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    content = f"\ufeff{text}\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    template = " ".join(f"{field}: {{{field}}}" for field in fields)
    format = task_format.of_template("films", template)
    found = inputs.from_files(str(tmp_path / name), format=format)
    assert ([item.text for item in found.read()], found.total) == ([given], 1)
    with pytest.raises(UserError, match=r"line 2 has no field 'title'|field=title names one"):
        inputs.from_files(str(tmp_path / name), field="title")


def test_a_header_without_rows_is_told_if_it_lacks_the_field(tmp_path):
    (tmp_path / "in.tsv").write_text("the only row\t1\n")
    with pytest.raises(UserError, match=r"in.tsv, line 1 has no field 'inputs or input or"):
        inputs.from_files(str(tmp_path / "in.tsv"))
    (tmp_path / "in.tsv").write_text("text\tid\n")
    assert inputs.from_files(str(tmp_path / "in.tsv")).faults() == "1 empty files"


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"input=/nowhere/in\.txt names no file"):
        inputs.from_files("/nowhere/in.txt")


def test_what_can_be_read_only_once_is_refused(tmp_path):
    """Inputs are counted first; then a pipe would be empty."""
    end, start = os.pipe()
    os.write(start, b"one\ntwo\n")
    os.close(start)
    os.mkfifo(tmp_path / "in.txt")
    for path in (f"/dev/fd/{end}", tmp_path, tmp_path / "in.*"):
        with pytest.raises(UserError, match=r"file \S+ is .*, not a regular file .*--input=-"):
            inputs.from_files(str(path))
    os.close(end)


@pytest.mark.parametrize("texts", [[], ["one"], ["one", "two", "more"]])
def test_files_that_change_after_they_were_counted_are_told(tmp_path, texts):
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    found = inputs.from_files(str(path))
    path.write_text("".join(f"{text}\n" for text in texts))
    read = []
    with pytest.raises(UserError, match=rf"in\.txt holds {len(texts)} inputs, .* 2 before"):
        read.extend(item.text for item in found.read())
    path.write_text("one\ntwo\n")
    assert len([*found.read()]) == 2


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("in.txt", "in.txt"),
        ("in.txt", "../link/in.txt"),
        (".", "out.jsonl"),
        ("../link", "new/deep/out.jsonl"),
        ("*", "out.jsonl"),
        ("*.json", "out.jsonl"),  # The settings beside it.
        ("../[h]*/*.t?t", "new.txt"),
        ("**/*.txt", "new/deep/out.txt"),
        ("../link/[io]*", "out.jsonl"),
    ],
)
def test_an_output_among_the_inputs_is_refused_before_it_is_there(
    tmp_path, monkeypatch, given, output
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("in.txt", "in.json"):
        (here / name).write_text('{"text": "one"}\n')
    (tmp_path / "link").symlink_to(here)
    with pytest.raises(UserError, match=r"output=\S+ lies among the files of input=\S+; write it"):
        inputs.from_files(given, output=output)


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("in.txt", "out.txt"),
        ("in[1].txt", "in1.txt"),
        (".", "../out.jsonl"),
        (".", ".out/out.jsonl"),
        ("*.txt", "out.jsonl"),
        ("*", "new/out.jsonl"),
        ("[in]*.txt", "sub/in.txt"),
        ("**/in.txt", "sub/out.txt"),
    ],
)
def test_an_output_beside_the_inputs_is_none_of_them(tmp_path, monkeypatch, given, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ("in[1].txt" if "1" in given else "in.txt")).write_text("one\n")
    assert inputs.from_files(given, output=output).total == 1


def test_the_command_reads_nothing_that_it_writes(run_dir, tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    argv = [f"--checkpoint={run_dir}", f"--input={tmp_path}", f"--output={tmp_path}/out.jsonl"]
    with pytest.raises(UserError, match=r"out\.jsonl lies among the files of input="):
        infer.main([*argv, "--dry_run"])


def test_inputs_that_would_be_answered_twice_are_told(tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress(b"one\n"))
    with pytest.raises(UserError, match="would be read twice"):
        inputs.from_files(str(tmp_path))


def test_a_stream_is_read_no_further_than_it_is_answered():
    taken = []

    def coming():
        for text in [b"one\n", b"two\n", b"three\n", b"four\n"]:
            taken.append(text)
            yield text

    read = inputs.from_stream(coming()).read()
    found = stream.predictions(Echo(), read, chunk_size=2)
    assert [record["input"] for record in next(found)] == ["one", "two"]
    assert len(taken) == 2


def test_what_came_before_a_faulty_line_of_a_stream_is_answered():
    read = inputs.from_stream([b"one\n", b"two\n", b"three\n", b"\xff\n", b"five\n"]).read()
    found = stream.predictions(Echo(), read, chunk_size=2)
    assert [record["input"] for record in next(found)] == ["one", "two"]
    assert [record["input"] for record in next(found)] == ["three"]
    with pytest.raises(UserError, match="line 4 is not UTF-8"):
        next(found)


def test_blank_lines_of_json_are_no_inputs(tmp_path):
    content = b'\n{"text": "one"}\n  \n{"text": "two"}\n\n'
    (tmp_path / "in.jsonl").write_bytes(content)
    read = inputs.from_files(str(tmp_path / "in.jsonl"))
    assert read.total == 2
    for each in (read, inputs.from_stream(io.BytesIO(content), "text")):
        assert [item.text for item in each.read()] == ["one", "two"]
    # A line of output stands for an input, not for a line of the file.
    found = stream.predictions(Echo(), read.read(), chunk_size=4, done=[{"input": "one"}])
    assert [(r["index"], r["input"]) for records in found for r in records] == [(1, "two")]


def test_an_output_cut_anywhere_is_continued_to_the_same_bytes(tmp_path):
    """As after a kill at any moment, in the middle of a character included."""
    texts = [f"text {i} é" for i in range(7)]
    write_all(tmp_path / "whole.jsonl", texts, seed=1)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert [r["index"] for r in read_records(tmp_path / "whole.jsonl")] == list(range(7))
    path = tmp_path / "cut.jsonl"
    write_all(path, [], seed=1)
    for end in range(0, len(whole) + 1, 5):
        path.write_bytes(whole[:end])
        predictor = write_all(path, texts, seed=1)
        assert path.read_bytes() == whole
        # Chunks that are there are not computed again.
        chunks_there = whole[:end].count(b"\n") // 4
        assert len(predictor.computed) == len(texts) - 4 * chunks_there or end == len(whole)


def test_a_complete_output_is_left_alone_and_grows_with_its_input(tmp_path):
    path = tmp_path / "out.jsonl"
    write_all(path, TEXTS[:4])
    before = path.read_bytes()
    assert write_all(path, TEXTS[:4]).computed == []
    assert path.read_bytes() == before
    assert write_all(path, TEXTS).computed == TEXTS[4:]
    assert [r["input"] for r in read_records(path)] == TEXTS


def test_an_output_of_other_settings_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    write_all(path, TEXTS, max_length=6)
    with pytest.raises(UserError, match=r"made with other settings \(max_length: 6 -> 7\)"):
        write_all(path, TEXTS, max_length=7)


def test_an_output_of_other_inputs_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    write_all(path, TEXTS)
    with pytest.raises(UserError, match=r"line 2 of the output was made from 'two'.* is 'zwei'"):
        write_all(path, ["one", "zwei", *TEXTS[2:]])
    with pytest.raises(UserError, match=r"more lines than there are inputs \(3\)"):
        write_all(path, TEXTS[:3])


def test_a_file_that_is_no_output_is_refused_and_kept(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text("my notes")
    with pytest.raises(UserError, match="holds something else"):
        write_all(path, TEXTS)
    assert path.read_text() == "my notes"


def test_one_process_writes_an_output(tmp_path):
    path = tmp_path / "out.jsonl"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="being written by another process"):
            write_all(path, TEXTS)


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output=.*/file/out.jsonl must be a file"):
        write_all(tmp_path / "file" / "out.jsonl", TEXTS)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gs://bucket/out.jsonl", "must be a local file; copy it"), ("new/", "ends as that of a fol")],
)
def test_an_output_that_is_no_local_file_makes_no_folder(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        ResumableLines(name, {})
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_regular_file_gets_nothing_beside_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match=r"must be a file .*not a regular file"):
            write_all(path, TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_dry_run_refuses_the_outputs_that_a_run_refuses(run_dir, tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    (tmp_path / "notes.jsonl").write_text("my notes")
    write_all(tmp_path / "other.jsonl", TEXTS)
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    argv = [f"--checkpoint={run_dir}", f"--input={tmp_path}/in.txt", "--dry_run"]
    for name, message in {
        ".": "it is not a regular file",
        "in.txt/out.jsonl": r"must be a file that can be written, but: .*in\.txt is no folder",
        "notes.jsonl": "holds something else",
        "other.jsonl": "was made with other settings",
        "loop": "Too many levels of symbolic links",
        "new/": "its name ends as that of a folder",
    }.items():
        with pytest.raises(UserError, match=message):
            infer.main([*argv, f"--output={tmp_path}/{name}"])
    assert infer.main([*argv, f"--output={tmp_path}/new/out.jsonl"]) == 0
    assert sorted(tmp_path.iterdir()) == before


def test_a_dialogue_answers_until_its_end():
    lines = iter(["hello", "  ", "bye"])

    def ask():
        for line in lines:
            return line
        raise EOFError

    out = io.StringIO()
    stream.converse(Echo(), ask, out)
    assert out.getvalue() == "HELLO\nBYE\n"


def test_a_line_that_is_not_utf_8_is_named_and_the_dialogue_goes_on(run_dir, capsys, monkeypatch):
    typed = io.BytesIO(b"good\nb\xffd\nfine\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, "utf-8"))
    assert infer.main([f"--checkpoint={run_dir}", "--interactive"]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 3
    assert re.match(r"error: the text 'b\\udcffd' is not UTF-8", answers[1])


@pytest.mark.parametrize("line", ["[]", "3", '{"index": 0, "inp'])
def test_a_line_of_an_output_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "out.jsonl"
    write_all(path, TEXTS)
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(UserError, match=r"out\.jsonl: line 1 is not a JSON object"):
        write_all(path, TEXTS)


def test_the_command_answers_a_file_and_continues_it(run_dir, tmp_path, capsys):
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"{text}\n" for text in [*WRITTEN, "x" * 30]))
    argv = [
        f"--checkpoint={run_dir}",
        f"--input={source}",
        f"--output={target}",
        "--strategy=beam",
        "--beam_size=2",
        "--batch_size=4",
        "--max_input_length=8",
    ]
    assert infer.main(argv) == 0
    whole = target.read_bytes()
    records = read_records(target)
    assert [record["input"] for record in records] == [*WRITTEN, "x" * 30]
    assert [record["truncated"] for record in records] == [0, 0, 1, 0, 23]
    for record in records:
        assert len(record["predictions"]) == len(record["scores"]) == 2
        assert record["scores"] == sorted(record["scores"], reverse=True)
    assert "2 inputs were longer than max_input_length=8" in capsys.readouterr().err

    target.write_bytes(whole[: whole.index(b"\n") + 9])
    assert infer.main(argv) == 0
    assert target.read_bytes() == whole
    assert "continues after 1 lines" in capsys.readouterr().err
    assert infer.main(argv) == 0
    assert "is complete: 5 lines" in capsys.readouterr().err


def test_a_complete_output_of_other_inputs_is_refused(run_dir, tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n")
    argv = [f"--checkpoint={run_dir}", f"--input={source}", f"--output={tmp_path / 'out.jsonl'}"]
    assert infer.main(argv) == 0
    assert infer.main(argv) == 0
    assert "is complete: 2 lines" in capsys.readouterr().err
    source.write_text("one\nanother\n")
    with pytest.raises(UserError, match="line 2 of the output was made from 'two', but input 2 is"):
        infer.main(argv)


@pytest.mark.slow
def test_an_output_of_an_earlier_run_of_the_same_name_is_refused(run_dir, task, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    other = tiny_run.write_run(tmp_path / "other", steps=(10,), task=task)
    (tmp_path / "in.txt").write_text("one\n")
    argv = [f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.jsonl"]
    assert infer.main([f"--checkpoint={run}", *argv]) == 0
    shutil.rmtree(run / "checkpoints/20")
    shutil.move(f"{other}/checkpoints/10", run / "checkpoints/20")
    for flags in ([], ["--dry_run"]):
        with pytest.raises(UserError, match=r"made with other settings \(model: \w+ -> \w+\)"):
            infer.main([f"--checkpoint={run}", *argv, *flags])
    # Outputs begun before, which do not tell their model, go on.
    path = tmp_path / "out.jsonl.settings.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in before.items() if k != "model"}))
    assert infer.main([f"--checkpoint={run}", *argv]) == 0


def test_an_output_of_an_exported_model_that_was_replaced_is_refused(tmp_path):
    model = tiny_run.make_model()
    params = dict(named_leaves(model))
    (tmp_path / "model").mkdir()
    portable.write_model(tmp_path / "model", model.config, params, step=7)
    (tmp_path / "in.txt").write_text("one\n")
    output = tmp_path / "out.jsonl"
    argv = [f"--checkpoint={tmp_path}/model", "--vocabulary=bytes", f"--output={output}"]
    argv += [f"--input={tmp_path}/in.txt", "--dry_run"]
    output.write_text("{}\n")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    told = {"model": loading.fingerprint(tmp_path / "copy")}
    (tmp_path / "out.jsonl.settings.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=r"made with other settings \((?!.*model: )"):
        infer.main(argv)
    name, first = next(iter(params.items()))
    portable.write_model(tmp_path / "model", model.config, {**params, name: first + 1}, step=7)
    with pytest.raises(UserError, match=r"made with other settings \(.*model: \w+ -> \w+"):
        infer.main(argv)


def test_the_command_answers_a_task_and_standard_input(run_dir, capsys, monkeypatch):
    argv = [f"--checkpoint={run_dir}", "--batch_size=4", "--max_input_length=8"]
    assert infer.main([*argv, "--task=tiny_infer", "--num_examples=3"]) == 0
    from_task = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["target"] for r in from_task] == [r["label"] for r in tiny_run.REVIEWS[:3]]
    lines = "".join(json.dumps({"review": r["text"]}) + "\n" for r in tiny_run.REVIEWS[:3])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert infer.main([*argv, "--field=review", "--input=-"]) == 0
    from_stdin = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one, other in zip(from_task, from_stdin, strict=True):
        assert one["predictions"] == other["predictions"]


def test_an_output_is_not_continued_in_another_vocabulary_of_the_same_name(run_dir, tmp_path):
    vocabulary, output = tmp_path / "spm.model", tmp_path / "out.jsonl"
    (tmp_path / "in.txt").write_text("one\n")
    argv = [f"--checkpoint={run_dir}", f"--vocabulary={vocabulary}", f"--output={output}"]
    argv += [f"--input={tmp_path}/in.txt", "--raw"]
    vocabulary.write_bytes(word_pieces.trained_model())
    assert infer.main(argv) == 0
    assert infer.main([*argv, "--dry_run"]) == 0
    vocabulary.write_bytes(word_pieces.trained_model(vocab_size=24))
    with pytest.raises(UserError, match="vocabulary_content: sentencepiece"):
        infer.main(argv)


def test_the_rows_of_a_task_are_those_that_eval_measures(run_dir, tmp_path, capsys):
    of_gin = {"every_nth": 2, "num_examples": 2, "split": "'validation'"}
    argv = [f"--gin.evaluation.EvalConfig.{name}={value}" for name, value in of_gin.items()]
    argv += [f"--checkpoint={run_dir}", "--task=tiny_infer"]
    assert infer.main(argv) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["target"] for r in found] == [r["label"] for r in tiny_run.REVIEWS[:4:2]]
    output = tmp_path / "out.jsonl"
    assert infer.main([*argv, f"--output={output}", "--num_examples=1"]) == 0
    assert len(output.read_text().splitlines()) == 1  # A flag takes precedence.
    told = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert told["input"] == "tiny_infer/validation, one of 2"
    with pytest.raises(UserError, match="split=absent is none of"):
        infer.main([*argv[1:], "--gin.evaluation.EvalConfig.split='absent'", "--dry_run"])


@pytest.mark.slow
def test_a_task_that_ranks_labels_is_answered_once_a_row(run_dir, capsys):
    ranked = synthetic.listops(rank=True)
    if ranked.name not in seqio.TaskRegistry.names():
        seqio.TaskRegistry.add_provider(ranked.name, ranked)
    argv = [f"--checkpoint={run_dir}", f"--task={ranked.name}", "--num_examples=2"]
    assert infer.main(argv) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    task = seqio.TaskRegistry.get("listops")
    rows = task.get_dataset(None, "validation", shuffle=False).take(2).as_numpy_iterator()
    assert [r["target"].encode() for r in found] == [r["targets_pretokenized"] for r in rows]


def test_rows_with_several_right_labels_or_none_are_answered_once_too(run_dir, capsys):
    right = {"good": "yn", "unknown": "", "bad": "n"}
    rows = [(text, label, i) for i, text in enumerate(right) for label in "yn"]
    columns = {
        "inputs": [text for text, _, _ in rows],
        "targets": [label for _, label, _ in rows],
        "idx": [[i, "yn".index(label)] for _, label, i in rows],
        "is_correct": [label in right[text] for text, label, _ in rows],
    }
    feature = seqio.Feature(vocabularies.characters())
    seqio.TaskRegistry.add(
        "tiny_ranked_rows",
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(columns),
            splits=["validation"],
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"inputs": feature, "targets": feature},
    )
    assert infer.main([f"--checkpoint={run_dir}", "--task=tiny_ranked_rows"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["input"] for r in found] == list(right)
    assert [r.get("target") for r in found] == ["y", None, "n"]


def test_an_input_that_is_not_utf_8_is_answered_and_such_a_target_is_named(run_dir, capsys):
    tiny_run.add_task("tiny_cafe", rows=[{"text": b"caf\xe9", "label": "yes"}])
    tiny_run.add_task("tiny_oui", rows=[{"text": "fine", "label": b"o\xf9i"}])
    assert infer.main([f"--checkpoint={run_dir}", "--task=tiny_cafe"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["input"], found["target"]) == ("caf\ufffd", "yes")
    with pytest.raises(UserError, match="task=tiny_oui: the 'targets' of example 1 of split="):
        infer.main([f"--checkpoint={run_dir}", "--task=tiny_oui"])


@pytest.mark.slow
def test_the_average_of_a_run_predicts_where_it_is_asked_for(task, tmp_path, capsys):
    run = tiny_run.write_run(tmp_path / "run", steps=(10, 20), task=task, average=10)

    def predictions(*flags):
        argv = [f"--checkpoint={run}", "--task=tiny_infer", "--num_examples=3", *flags]
        assert infer.main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line)["scores"] for line in lines]

    assert predictions("--step=20", "--ema") == predictions("--step=10")
    assert predictions("--step=20") != predictions("--step=10")


def test_an_exported_model_needs_a_vocabulary(tmp_path, capsys):
    model = tiny_run.make_model()
    folder = tmp_path / "exported"
    folder.mkdir()
    params = {name: leaf for name, leaf in named_leaves(model)}
    portable.write_model(folder, model.config, params, step=7)
    (tmp_path / "in.txt").write_text("one\n")
    argv = [f"--checkpoint={folder}", f"--input={tmp_path / 'in.txt'}", "--dry_run"]
    with pytest.raises(
        UserError, match=r"exported is neither a SentencePiece file, nor a model with"
    ):
        infer.main(argv)
    (folder / "spiece.model").write_text("damaged")
    with pytest.raises(UserError, match=r"spiece\.model cannot be read.* or remove it and name"):
        infer.main([*argv, "--vocabulary=bytes"])
    (folder / "spiece.model").unlink()
    assert infer.main([*argv, "--vocabulary=bytes"]) == 0
    assert "ByteVocabulary, 359 ids" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"vocabulary path=.*/spm.model' names no file"):
        infer.main([*argv, f"--vocabulary={tmp_path}/spm.model"])
    assert "replaces" not in capsys.readouterr().err
    kept = vocabulary_files.KeptVocabulary("sentencepiece", 100, word_pieces.trained_model())
    vocabulary_files.write(folder / "vocabulary", vocabulary_files.KeptText(kept, kept))
    assert infer.main([*argv, "--vocabulary=bytes"]) == 0
    assert "note: vocabulary=bytes (characters" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none is neither a SentencePiece file, nor a model with"):
        infer.main([*argv, f"--vocabulary={tmp_path}/none"])


def test_a_run_whose_data_is_elsewhere_can_be_used_with_a_vocabulary(run_dir, tmp_path, capsys):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "checkpoints").symlink_to(f"{run_dir}/checkpoints")
    (moved / "config.gin").write_text("from __gin__ import dynamic_registration\nimport not_here\n")
    (tmp_path / "in.txt").write_text("one\n")
    argv = [f"--checkpoint={moved}", f"--input={tmp_path / 'in.txt'}", "--dry_run"]
    with pytest.raises(UserError, match="no module not_here"):
        infer.main(argv)
    assert infer.main([*argv, "--vocabulary=bytes"]) == 0
    captured = capsys.readouterr()
    assert "the run's settings are left out" in captured.err
    assert "1 from" in captured.out


def test_a_run_whose_training_data_is_gone_can_be_used_with_a_vocabulary(task, tmp_path, capsys):
    run = tiny_run.write_run(tmp_path / "run", steps=(20,), task=task)
    config = tmp_path / "run" / "config.gin"
    gone = "@cached_data.CachedDataConfig()\ncached_data.CachedDataConfig.path = '/no/cache'\n"
    text = config.read_text().replace("@data.DataConfig()\n", gone)
    lines = [line for line in text.splitlines() if not line.startswith("data.")]
    lines = [line.replace("import data", "import cached_data") for line in lines]
    config.write_text("\n".join(lines) + "\ncached_data.CachedDataConfig.batch_size = 4\n")
    (tmp_path / "in.txt").write_text("one\n")
    argv = [f"--checkpoint={run}", f"--input={tmp_path / 'in.txt'}", "--dry_run"]
    with pytest.raises(UserError, match="/no/cache"):
        infer.main(argv)
    assert infer.main([*argv, "--vocabulary=bytes", "--max_length=7"]) == 0
    captured = capsys.readouterr()
    assert "the lengths of the run are not known" in captured.err
    assert "512 tokens in, 7 out" in captured.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--checkpoint is missing"),
        (["--checkpoint={run}", "--input=a", "--task=b"], "--input and --task exclude each other"),
        (["--checkpoint={run}", "--input=a", "--split=b"], "--split is for --task"),
        (["--checkpoint={run}", "--interactive", "--output=a"], "--output applies to --input"),
        (["--checkpoint={run}", "--step=all,", "--task=a"], "step=all, must be latest"),
        (["--checkpoint={run}", "--task=tiny_infer", "--split=test"], "split=test is none of"),
        (
            ["--checkpoint={run}", "--task=tiny_infer", "--strategy=rank", "--dry_run"],
            "strategy=rank chooses among the labels of the task",
        ),
        (
            ["--checkpoint={run}", "--task=tiny_infer", "--ema"],
            "holds no moving average of the parameters",
        ),
        (
            ["--checkpoint={run}", "--task=tiny_infer", "--ema", "--dry_run"],
            "holds no moving average of the parameters",
        ),
    ],
)
def test_what_a_user_can_get_wrong_ends_in_one_message(run_dir, argv, message):
    with pytest.raises(UserError, match=message):
        infer.main([part.format(run=run_dir) for part in argv])


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    lines = [json.dumps({"text": t}) if "json" in suffix else t for t in WRITTEN]
    content = "".join(f"{line}\n" for line in lines).encode("utf-8-sig")
    (tmp_path / f"in{suffix}").write_bytes(content)
    read = inputs.from_files(str(tmp_path / f"in{suffix}"))
    assert [item.text for item in read.read()] == WRITTEN
    stream_of = inputs.from_stream(io.BytesIO(content), "text" if "json" in suffix else None)
    assert [item.text for item in stream_of.read()] == WRITTEN


@pytest.mark.parametrize(
    "suffix", [".txt.xz", ".json", ".json.gz", ".json.xz", ".ndjson", ".ndjson.gz", ".jsonl.bz2"]
)
def test_files_of_every_compression_are_read_by_their_kind(tmp_path, suffix):
    compress = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
    lines = [json.dumps({"text": t}) if "json" in suffix else t for t in WRITTEN]
    content = "".join(f"{line}\n" for line in lines).encode()
    path = tmp_path / f"in{suffix}"
    path.write_bytes(compress.get(suffix.rpartition(".")[2], bytes)(content))
    assert [item.text for item in inputs.from_files(str(path)).read()] == WRITTEN


def test_damaged_files_are_named(tmp_path):
    whole = gzip.compress(b"one\ntwo\n")
    no_block = whole[:10] + b"\xff" + whole[11:]
    for content in (whole[: len(whole) // 2], b"plain text\n", no_block):
        (tmp_path / "in.txt.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"in\.txt\.gz' cannot be read .*is it complete"):
            inputs.from_files(str(tmp_path / "in.txt.gz"))


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold_is_named_by_its_line(tmp_path, line):
    (tmp_path / "in.jsonl").write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(UserError, match=r"in\.jsonl, line 2 is not JSON"):
        inputs.from_files(str(tmp_path / "in.jsonl"))


@pytest.mark.parametrize("content", ['{"task": "a", "sett', "", "[]", "null"])
def test_results_that_were_cut_are_none(tmp_path, content):
    results = Results(tmp_path, {"max_length": 6})
    path = results.write(Outcome("a", "test", {"loss": 1.0}, {}, []), None)
    assert results.exists("a", "test", None)
    path.write_text(content)
    assert not results.exists("a", "test", None)


@pytest.mark.parametrize("content", ['{"max_le', "", "null", "3"])
def test_damaged_settings_beside_an_output_are_named(tmp_path, content):
    path = tmp_path / "out.jsonl"
    write_all(path, TEXTS, max_length=6)
    (tmp_path / "out.jsonl.settings.json").write_text(content)
    with pytest.raises(UserError, match=r"out\.jsonl\.settings\.json .*damaged.* remove the file"):
        write_all(path, TEXTS, max_length=6)
