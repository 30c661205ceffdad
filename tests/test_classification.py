"""Classification reads TFDS and local files alike, generates or ranks labels, names bad rows."""

import collections
import functools
import gzip
import json
import math
import pathlib
import shutil
import sys
import time

import pytest
import seqio
import tensorflow_datasets as tfds
from convt5.tasks import (
    classification,
    cogs,
    denoising,
    formats,
    generation,
    glue,
    pretraining,
    squad,
    synthetic,
    tables,
    vocabularies,
)
from convt5.tasks.classification import PAPER_TASKS, paper_task, text_classification
from quick import quick
from task_examples import examples

from convt5 import data, errors, evaluation
from convt5.configuration import gin_config
from convt5.runtime import local_files
from convt5.text import task_format

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = [
    {"text": "a fine film", "label": "positive"},
    {"text": "a dull film", "label": "negative"},
    {"text": "no film at all", "label": "negative"},
]
LABELS = ["negative", "positive"]


def write_rows(path, rows):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    for name in ("train.jsonl.gz", "dev.jsonl", "extra.jsonl"):
        write_rows(tmp_path / name, ROWS)
    return str(tmp_path)


def texts(task, split="train", **arguments):
    found = examples(task, split, **arguments)
    return [(e["inputs_pretokenized"].decode(), e["targets_pretokenized"].decode()) for e in found]


class TestFiles:
    def test_files_of_a_folder_are_splits(self, folder):
        task = paper_task("sst2", folder)
        assert set(task.splits) == {"train", "validation", "extra"}
        expected = [(f"sst2 sentence: {row['text']}", row["label"]) for row in ROWS]
        assert texts(task) == texts(task, "validation") == texts(task, "extra") == expected

    def test_folders_of_a_folder_are_splits_too(self, tmp_path):
        for name in ("train/a.jsonl", "train/below/b.jsonl", "dev/a.jsonl", "test.jsonl"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            write_rows(tmp_path / name, ROWS[:1])
        (tmp_path / "train" / ".hidden").mkdir()
        write_rows(tmp_path / "train" / ".hidden" / "c.jsonl", ROWS)
        (tmp_path / "train" / "README.txt").write_text("no rows")
        task = paper_task("sst2", str(tmp_path))
        assert set(task.splits) == {"train", "validation", "test"}
        assert [len(texts(task, split)) for split in ("train", "validation", "test")] == [2, 1, 1]

    def test_ids_end_with_the_end_token(self, folder):
        example = examples(paper_task("sst2", folder))[0]
        vocabulary = vocabularies.characters()
        assert example["targets"].tolist() == [*vocabulary.encode("positive"), 1]

    @pytest.mark.parametrize(
        ("name", "content", "columns"),
        [
            ("train.tsv", "label\ttext\npositive\ta fine film\n", None),
            ("train.tsv", 'a "fine" film\tpositive\n', ["text", "label"]),
            ("train.csv", 'text,label\n"a fine, long\nfilm",positive\n', None),
        ],
    )
    def test_tables_have_a_header_or_named_columns(self, tmp_path, name, content, columns):
        (tmp_path / name).write_text(content)
        task = text_classification(
            str(tmp_path / name), LABELS, columns=columns, prompt="{text}", validation_fraction=0
        )
        ((text, label),) = texts(task)
        assert label == "positive"
        assert text in ("a fine film", 'a "fine" film', "a fine, long\nfilm")

    def test_several_fields_make_one_input(self, tmp_path):
        row = {"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment"}
        path = write_rows(tmp_path / "train.jsonl", [row])
        expected = [("mnli hypothesis: It is wet. premise: It rains.", "entailment")]
        assert texts(paper_task("mnli", path, validation_fraction=0)) == expected

    def test_a_new_task_names_its_fields_and_renames_its_labels(self, tmp_path):
        rows = [{"body": "x", "polarity": p} for p in (0, 2, 4)]
        task = text_classification(
            write_rows(tmp_path / "a.jsonl", rows),
            {"0": "negative", "2": None, "4": "positive"},
            text_field="body",
            label_field="polarity",
            validation_fraction=0,
            name="tweets",
        )
        assert texts(task) == [("tweets body: x", "negative"), ("tweets body: x", "positive")]

    def test_numbers_may_stand_for_labels(self, tmp_path):
        rows = [{"text": "x", "toxicity": t} for t in (0.1, 0.5, 0.9)]
        task = text_classification(
            write_rows(tmp_path / "a.jsonl", rows),
            ["fine", "toxic"],
            label_field="toxicity",
            threshold=0.5,
            validation_fraction=0,
        )
        assert [label for _, label in texts(task)] == ["fine", "toxic", "toxic"]

    def test_rows_are_held_out_where_no_file_is_for_validation(self, tmp_path):
        rows = [{"text": f"{i:02d}", "label": "positive"} for i in range(20)]
        task = text_classification(
            {"train": write_rows(tmp_path / "a.jsonl", rows)}, LABELS, prompt="{text}"
        )
        train, held_out = ([text for text, _ in texts(task, s)] for s in ("train", "validation"))
        assert held_out == ["01", "11"]
        assert sorted(train + held_out) == [row["text"] for row in rows]

    @pytest.mark.parametrize("period", [2, 3])
    def test_a_label_that_a_regular_order_keeps_from_the_held_out_rows_is_told(
        self, tmp_path, caplog, period
    ):
        rows = [{"text": f"{i}", "label": LABELS[i % period == 0]} for i in range(600)]
        path = write_rows(tmp_path / "a.jsonl", rows)
        task = text_classification({"train": path}, LABELS, prompt="{text}")
        held_out = {label for _, label in texts(task, "validation")}
        assert len(held_out) == (1 if period == 2 else 2)
        told = f"none of the 300 with label={LABELS[1]!r}" in caplog.text
        assert told == (period == 2)

    def test_epochs_have_orders_of_their_own_that_follow_from_the_seed(self, tmp_path):
        rows = [{"text": f"{i:02d}", "label": "positive"} for i in range(20)]
        path = write_rows(tmp_path / "a.jsonl", rows)
        task = text_classification(path, LABELS, prompt="{text}", validation_fraction=0)
        one, again, other = (
            [text for text, _ in texts(task, shuffle=True, seed=seed, num_epochs=2)]
            for seed in (0, 0, 1)
        )
        assert one == again != other
        assert sorted(one[:20]) == sorted(one[20:]) == [row["text"] for row in rows]
        assert one[:20] != one[20:]

    def test_hosts_share_the_rows(self, folder):
        task = paper_task("sst2", folder)
        shares = [texts(task, shard_info=seqio.ShardInfo(i, 2)) for i in range(2)]
        assert sorted(shares[0] + shares[1]) == sorted(texts(task))

    @pytest.mark.slow
    def test_batches_go_on_at_a_saved_position(self, folder):
        config = data.DataConfig(
            mixture=paper_task("sst2", folder), batch_size=2, encoder_length=40, decoder_length=16
        )
        batches = config.build(process_index=0, process_count=1)
        next(batches)
        position = batches.get_state()
        expected = [next(batches)["encoder_input_tokens"].tolist() for _ in range(3)]
        again = config.build(process_index=0, process_count=1)
        again.set_state(position)
        assert [next(again)["encoder_input_tokens"].tolist() for _ in range(3)] == expected

    @pytest.mark.slow
    def test_a_run_goes_on_where_its_rows_were_copied_to(self, folder, tmp_path):
        def build(path):
            config = data.DataConfig(
                mixture=paper_task("sst2", path), batch_size=2, encoder_length=40, decoder_length=16
            )
            return config.build(process_index=0, process_count=1)

        batches = build(folder)
        next(batches)
        position = batches.get_state()
        expected = [next(batches)["encoder_input_tokens"].tolist() for _ in range(3)]
        copied = shutil.copytree(folder, tmp_path / "copied", copy_function=shutil.copyfile)
        again = build(str(copied))
        again.set_state(position)
        assert [next(again)["encoder_input_tokens"].tolist() for _ in range(3)] == expected

        changed = copied / "dev.jsonl"
        changed.write_text(changed.read_text().replace("dull", "full"))
        with pytest.raises(
            errors.UserError, match=r"data of the run changed since its checkpoint \(content:"
        ):
            build(str(copied)).set_state(position)


class TestRank:
    def test_every_label_of_every_row_is_scored(self, folder):
        task = paper_task("sst2", folder, rank=True)
        assert task.name == "sst2_rank"
        assert [label for _, label in texts(task)] == LABELS * 3
        targets = [task.postprocess_fn("", example=e, is_target=True) for e in examples(task)]
        assert [(t.example, t.label) for t in targets] == [(i, j) for i in range(3) for j in (0, 1)]
        assert [t.is_correct for t in targets] == [False, True, True, False, True, False]

    def test_metrics_choose_the_likeliest_label(self, folder):
        task = paper_task("sst2", folder, rank=True)
        targets = [task.postprocess_fn("", example=e, is_target=True) for e in examples(task)]
        (metric,) = task.score_metric_fns
        assert task.predict_metric_fns == []
        right = [-1.0 if target.is_correct else -2.0 for target in targets]
        assert metric(targets, right) == {"accuracy": 100.0, "f1": 100.0, "macro_f1": 100.0}


def test_generated_labels_are_measured(folder):
    task = paper_task("sst2", folder)
    targets = [task.postprocess_fn(label, example={}, is_target=True) for _, label in texts(task)]
    predictions = [
        task.postprocess_fn(text, example={}, is_target=False)
        for text in ("positive ", "negative", "banana")
    ]
    found = {}
    for metric in task.predict_metric_fns:
        found |= metric(targets, predictions)
    assert found["accuracy"] == found["invalid"] + 100 / 3 == pytest.approx(200 / 3)
    assert set(found) == {"accuracy", "f1", "macro_f1", "invalid"}


class TestTfds:
    @pytest.mark.parametrize("name", quick(list(PAPER_TASKS), chosen=["sst2", "civil_comments"]))
    def test_the_published_schema_is_read(self, name):
        task = paper_task(name, vocabulary=vocabularies.characters())
        with tfds.testing.mock_data(num_examples=6):
            found = texts(task, "validation")
        assert found
        start = PAPER_TASKS[name].prompt.partition("{")[0]
        assert all(text.startswith(start) for text, _ in found)
        assert {label for _, label in found} <= set(PAPER_TASKS[name].labels)

    @pytest.mark.parametrize(
        "name", ["imdb", "sst2", "ag_news", "mnli"], ids=lambda name: f"labels_of_{name}"
    )
    def test_labels_stand_in_the_order_of_tfds(self, name):
        features = tfds.builder(PAPER_TASKS[name].tfds_name).info.features
        own = [label.lower() for label in PAPER_TASKS[name].labels]
        assert all(
            a.startswith(b.lower()) for a, b in zip(own, features["label"].names, strict=True)
        )

    def test_questions_stand_in_the_order_of_tfds(self):
        features = tfds.builder("trec:1.0.0").info.features
        names = {"DESC": "description", "ENTY": "entity", "ABBR": "abbreviation", "HUM": "human"}
        names |= {"NUM": "number", "LOC": "location"}
        assert tuple(names[n] for n in features["label-coarse"].names) == (
            PAPER_TASKS["trec6"].labels
        )

    def test_neutral_tweets_are_left_out(self):
        import tensorflow as tf

        task = PAPER_TASKS["sentiment140"]
        dataset = tf.data.Dataset.from_tensor_slices(
            {"text": ["a", "b", "c"], "polarity": [0, 2, 4]}
        )
        rows = classification._tfds_rows(dataset, to_row=task.to_row, keep=task.keep)
        assert [row["label"].decode() for row in rows.as_numpy_iterator()] == LABELS

    def test_the_form_is_that_of_t5(self):
        t5_preprocessors = pytest.importorskip("t5.data.preprocessors")
        task = paper_task("mnli", vocabulary=vocabularies.characters())
        with tfds.testing.mock_data(num_examples=2):
            raw = task.source.get_dataset("validation", shuffle=False)
            expected = t5_preprocessors.glue(
                raw.map(lambda x: {**x, "idx": 0}),
                benchmark_name="mnli",
                label_names=["entailment", "neutral", "contradiction"],
                feature_names=["hypothesis", "premise"],
            )
            expected = [
                (e["inputs"].decode(), e["targets"].decode()) for e in expected.as_numpy_iterator()
            ]
            assert texts(task, "validation") == expected

    @pytest.mark.parametrize("name", PAPER_TASKS)
    def test_tasks_are_registered_to_be_generated_and_ranked(self, name):
        assert seqio.get_mixture_or_task(name).predict_metric_fns
        assert seqio.get_mixture_or_task(f"{name}_rank").score_metric_fns


class TestBadInput:
    @pytest.fixture
    def read(self, tmp_path):
        def read(content, name="train.jsonl", **settings):
            (tmp_path / name).write_text(content)
            task = text_classification(
                str(tmp_path / name), LABELS, validation_fraction=0, **settings
            )
            return texts(task)

        return read

    GOOD = '{"text": "x", "label": "positive"}\n'

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{text: 1}", r"train.jsonl', line 3 is not JSON .* one object a line"),
            ("[1, 2]", r"line 3 is no JSON object"),
            (
                '{"text": "x", "label": "positiv"}',
                r"line 3 has the unknown label 'positiv' .* mean",
            ),
            ('{"text": " ", "label": "positive"}', r"line 3 has nothing under 'text'"),
            ('{"text": "x", "label": null}', r"line 3 has nothing under 'label'"),
            ('{"text": NaN, "label": "positive"}', r"line 3 has nothing under 'text'"),
            ('{"body": "x", "label": "positive"}', r"no field 'text'; .*\['body', 'label'\]"),
            ('{"text": -1e400, "label": "positive"}', r"line 3 has -inf under 'text', .* no text"),
            ('{"text": ["x"], "label": "positive"}', r"line 3 has \['x'\] under 'text'"),
        ],
    )
    def test_a_bad_line_is_named(self, read, line, message):
        with pytest.raises(errors.UserError, match=message):
            read(f"{self.GOOD}\n{line}\n")

    def test_a_table_line_with_too_many_cells_is_named(self, read):
        with pytest.raises(errors.UserError, match="line 2 has 3 columns, not 2"):
            read("text\tlabel\na\tb\tpositive\n", "train.tsv")

    @pytest.mark.parametrize(
        ("field", "is_counted"),
        [('"He said ""no"" twice"', 1), ('""""', 1), ('"lone', 0), ('"a", "b"', 0), ('"a"', 0)],
    )
    def test_quotes_of_a_table_with_tabs_are_text(self, read, caplog, field, is_counted):
        (example,) = read(f"text\tlabel\n{field}\tpositive\n", "train.tsv")
        assert example == (f"text_classification text: {field}", "positive")
        assert ("1 rows of .tsv quoted like .csv" in caplog.text) == is_counted

    def test_broken_quotes_of_csv_are_named(self, read):
        with pytest.raises(errors.UserError, match="line 2 is not CSV"):
            read('text,label\n"a"b,positive\n', "train.csv")

    def test_a_file_of_another_kind_is_named(self, read):
        with pytest.raises(errors.UserError, match=r"train.parquet' is of no known kind"):
            read("PAR1", "train.parquet")

    def test_a_file_without_rows_is_named(self, read):
        with pytest.raises(errors.UserError, match="split='train' has no row"):
            read("\n")

    def test_what_is_no_number_is_named(self, read):
        with pytest.raises(errors.UserError, match="'positive' under 'label', no number"):
            read(self.GOOD, threshold=0.5)

    @pytest.mark.parametrize(
        ("missing", "message"),
        [("NaN", "nothing under 'label'"), ('"nan"', "'nan' under 'label', no number")],
    )
    def test_a_missing_number_is_on_neither_side_of_a_threshold(self, read, missing, message):
        with pytest.raises(errors.UserError, match=f"line 1 has {message}"):
            read(f'{{"text": "x", "label": {missing}}}\n', threshold=0.5)

    def test_a_threshold_that_is_no_number_is_refused(self, folder):
        with pytest.raises(errors.UserError, match=r"threshold=nan of .* must be a number"):
            text_classification(folder, LABELS, threshold=float("nan"))

    def test_a_column_that_is_named_twice_is_refused(self, read):
        with pytest.raises(errors.UserError, match="line 1 names the column 'text' twice"):
            read("text,text,label\na,b,positive\n", "train.csv")

    def test_a_header_without_rows_is_told_if_it_lacks_a_field(self, read):
        # It may be the only row of a file without a header.
        with pytest.raises(errors.UserError, match=r"line 1 has no field 'label'; its fields are"):
            read("a fine film\tpositive\n", "train.tsv")
        with pytest.raises(errors.UserError, match="split='train' has no row"):
            read("text\tlabel\n", "train.tsv")

    def test_columns_without_a_name_are_left_alone(self, read):
        assert read("text,label,,\na,positive,,\n", "train.csv") == [
            ("text_classification text: a", "positive")
        ]

    def test_a_folder_without_tables_is_an_error(self, tmp_path):
        with pytest.raises(errors.UserError, match=r"is a folder without a \.jsonl"):
            paper_task("sst2", str(tmp_path))

    def test_a_path_without_files_is_an_error(self, tmp_path):
        with pytest.raises(errors.UserError, match="matches no file"):
            paper_task("sst2", str(tmp_path / "absent.jsonl"))

    def test_a_task_that_is_none_of_the_paper_is_an_error(self):
        with pytest.raises(errors.UserError, match=r"name='sst' is none of .* Did you mean sst2"):
            paper_task("sst")

    @pytest.mark.parametrize("labels", [["one"], ["one", "one"], ["one", ""]])
    def test_labels_must_be_two_different_texts(self, folder, labels):
        with pytest.raises(errors.UserError, match="must be two or more different texts"):
            text_classification(
                folder, labels if labels != ["one", "one"] else {"a": "one", "b": "one"}
            )

    def test_a_prompt_must_hold_the_fields(self, folder):
        with pytest.raises(errors.UserError, match=r"must hold each of text_field=\['text'\]"):
            text_classification(folder, LABELS, prompt="sentence: {sentence}")

    def test_a_threshold_divides_two_labels(self, folder):
        with pytest.raises(errors.UserError, match=r"threshold=0.5 of .* separates two labels"):
            text_classification(folder, ["a", "b", "c"], threshold=0.5)

    def test_a_split_that_is_not_there_is_named(self, folder):
        task = paper_task("sst2", folder)
        with pytest.raises(errors.UserError, match="split='tests' is none of"):
            task.source.get_dataset("tests")
        config = data.DataConfig(
            mixture=task, split="test", batch_size=1, encoder_length=8, decoder_length=8
        )
        with pytest.raises(errors.UserError, match="split='test' is none of"):
            config.build(process_index=0, process_count=1)

    @pytest.mark.parametrize("fraction", [-0.1, 0.6])
    def test_the_held_out_share_has_limits(self, folder, fraction):
        with pytest.raises(errors.UserError, match=r"must be in \[0, 0\.5\]"):
            paper_task("sst2", folder, validation_fraction=fraction)

    def test_the_smallest_share_holds_out_the_second_row(self, folder):
        smallest = paper_task("sst2", folder, validation_fraction=5e-324)
        assert smallest.splits == paper_task("sst2", folder).splits
        assert local_files.holdout_every(5e-324) == round(1 / sys.float_info.min)
        assert local_files.holdout_every(0) is None


class TestGinFiles:
    # Of the others there is no data; test_glue.py reads some.
    NAMES = tuple(
        path.stem
        for path in sorted((ROOT / "gin" / "tasks").glob("*.gin"))
        if path.stem not in ("text_classification", "summarization", glue.STSB)
        and path.stem not in glue.CLASSIFICATIONS
    )

    def load(self, name, *bindings):
        config = gin_config.load(
            [f"gin/tasks/{name}.gin"], bindings, roots=["@convt5.evaluation.EvalConfig"]
        )
        return config.arguments(evaluation.EvalConfig)["tasks"]

    @pytest.mark.parametrize("name", NAMES)
    def test_local_data_is_read_as_its_file_says(self, shared_data, name):
        tasks = self.load(
            name,
            f"DATA={shared_data / name}",
            f"VOCABULARY={shared_data / 'vocab' / 't5_cc_all_32000.model'}",
        )
        assert [task.name for task in tasks] in ([name], [name, f"{name}_rank"])
        assert {"train", "validation"} <= set(tasks[0].splits)

    @pytest.mark.parametrize("labels", [["bad", "good"], [0, 1]])
    def test_any_classification_needs_no_python(self, tmp_path, labels):
        write_rows(tmp_path / "train.jsonl", [{"review": "x", "verdict": labels[1]}])
        generated, ranked = self.load(
            "text_classification",
            f"DATA={tmp_path}",
            f"LABELS={labels}",
            "TEXT_FIELD=review",
            "LABEL_FIELD=verdict",
            "classification.text_classification.vocabulary=@vocabularies.characters()",
            "classification.text_classification.validation_fraction=0.0",
        )
        assert texts(generated) == [("text_classification review: x", str(labels[1]))]
        assert [label for _, label in texts(ranked)] == list(map(str, labels))


def test_real_rows_become_examples(shared_data):
    task = paper_task("trec6", str(shared_data / "trec6"))
    found = texts(task, "test")
    assert len(found) == 252
    assert ("trec6 question: When did Hawaii become a state ?", "number") in found


class TestUnusualFiles:
    """What is rare in files of rows is read, or named by file and line."""

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (r'{"text": "half \ud83d tail", "label": "positive"}', r"line 2 has half of a char"),
            ("[" * 100_000, r"line 2 is not JSON"),
            ('{"text": ' + "9" * 5000 + "}", r"line 2 is not JSON"),
            ('{"label": "x", "label": "positive"}', r"line 2 is not JSON \('label' is there twice"),
        ],
    )
    def test_json_that_stands_for_no_text_is_named_by_its_line(self, tmp_path, line, message):
        path = tmp_path / "train.jsonl"
        path.write_text(f'{{"text": "x", "label": "positive"}}\n{line}\n')
        task = text_classification(str(path), LABELS, validation_fraction=0)
        with pytest.raises(errors.UserError, match=rf"train\.jsonl', {message}"):
            texts(task)

    def test_half_of_a_character_in_a_field_that_is_not_read_is_no_fault(self, tmp_path):
        path = tmp_path / "train.jsonl"
        path.write_text(r'{"text": "x", "label": "positive", "id": "\ud83d"}')
        task = text_classification(str(path), LABELS, prompt="{text}", validation_fraction=0)
        assert texts(task) == [("x", "positive")]

    def test_damaged_archives_are_named(self, tmp_path):
        path = tmp_path / "train.jsonl.gz"
        whole = gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())
        no_block = whole[:10] + b"\xff" + whole[11:]
        for content in (whole[: len(whole) // 2], b"plain text\n", no_block):
            path.write_bytes(content)
            task = text_classification(str(path), LABELS, validation_fraction=0)
            with pytest.raises(errors.UserError, match=r"train\.jsonl\.gz' cannot be read"):
                texts(task)

    def test_a_field_of_csv_may_be_as_long_as_a_book(self, tmp_path):
        book = "word " * 100_000
        (tmp_path / "train.csv").write_text(f'text,label\n"{book}",positive\n')
        task = text_classification(
            str(tmp_path / "train.csv"), LABELS, prompt="{text}", validation_fraction=0
        )
        assert texts(task) == [(book, "positive")]


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (functools.partial(paper_task, "sst2"), {"text": "für", "label": "positive"}),
        (functools.partial(glue.glue, "stsb"), {"sentence1": "für", "sentence2": "x", "label": 3}),
        (functools.partial(glue.glue, "sst2"), {"text": "für", "label": "positive"}),
        (squad.squad, {"context": "für", "question": "x", "answers": "y"}),
        (cogs.cogs, {"text": "für", "target": "x", "category": "y"}),
        (generation.summarization, {"document": "für", "summary": "x"}),
    ],
)
def test_any_task_from_files_deals_with_bytes_that_are_no_utf_8(tmp_path, make, row):
    line = json.dumps(row, ensure_ascii=False) + "\n"
    (tmp_path / "train.jsonl").write_bytes(line.encode("latin1") + line.encode() * 2)

    def read(policy):
        file = str(tmp_path / "train.jsonl")
        task = make(path={"train": file, "validation": file}, invalid_utf8=policy)
        return [text for text, _ in texts(task)], task.source.tally("train")

    with pytest.raises(errors.UserError, match=r"train\.jsonl', line 1 is not UTF-8"):
        read("refuse")
    replaced, tally = read("replace")
    assert "f\ufffdr" in replaced[0]
    assert (len(replaced), tally.replaced) == (3, 1)
    skipped, tally = read("skip")
    assert skipped == replaced[1:]
    assert tally.skipped == 1


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.jsonl"])
def test_the_text_of_a_field_is_what_is_in_the_file(tmp_path, name):
    text, label = "  two  blanks\u00a0", " positive "
    content = {
        "train.csv": f"text,label\r\n{text},{label}\r\n",
        "train.tsv": f"text\tlabel\n{text}\t{label}\n",
        "train.jsonl": json.dumps({"text": text, "label": label}),
    }[name]
    (tmp_path / name).write_bytes(f"\ufeff{content}".encode())
    task = text_classification(
        str(tmp_path / name), LABELS, prompt="read: {text}", validation_fraction=0
    )
    assert texts(task) == [(f"read: {text}", "positive")]
    assert formats.of(task)[0].text({"text": text}) == f"read: {text}"

    def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(self, tmp_path):
        path = write_rows(tmp_path / "a[1].jsonl", ROWS)
        assert len(texts(text_classification(path, LABELS, validation_fraction=0))) == 3

    def test_a_path_may_be_an_object(self, folder):
        folder = pathlib.Path(folder)
        expected = texts(paper_task("sst2", str(folder)))
        file = folder / "dev.jsonl"
        for path in (folder, file, [file], {"train": file}, {"train": [file]}):
            task = text_classification(
                path, LABELS, name="sst2", prompt="sst2 sentence: {text}", validation_fraction=0
            )
            assert texts(task) == expected


def test_rows_that_are_cut_end_with_their_end_token(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "much too long", "label": "good"}\n' * 2)
    for rank in (False, True):
        task = text_classification(str(tmp_path), ["bad", "good"], rank=rank, validation_fraction=0)
        lengths = {"inputs": 9, "targets": 3}
        for example in task.get_dataset(lengths, "train", shuffle=False).as_numpy_iterator():
            assert {name: len(example[name]) for name in lengths} == lengths
            assert [example[name][-1] for name in lengths] == [1, 1]


@pytest.mark.parametrize("file", ["dev.jsonl", "dev.jsonl.gz"])
def test_rows_that_measure_a_model_are_not_trained_on(folder, file):
    (pathlib.Path(folder) / file).touch()
    train = [f"{folder}/train.jsonl.gz", f"{folder}/{file}"]
    path = {"train": train, "validation": f"{folder}/dev.jsonl"}
    with pytest.raises(errors.UserError, match=r"dev\.jsonl' of split='validation' is also among"):
        paper_task("sst2", path)


def test_no_row_of_a_folder_is_read_twice(folder):
    path = pathlib.Path(folder)
    (path / "._dev.jsonl").write_bytes(b"\0\5\x16\7")
    assert len(texts(paper_task("sst2", folder), "validation")) == 3
    write_rows(path / "train.jsonl", ROWS)
    with pytest.raises(errors.UserError, match=r"train\.jsonl' and .*train\.jsonl\.gz' .*twice"):
        paper_task("sst2", folder)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.csv", "train.jsonl.gz"], None),
        (["dev.csv", "validation.csv"], None),
        (["train/a.tsv", "train/a.csv"], None),
        (["train.1.csv", "train.2.csv", "train/1.csv"], {"train": 3}),
        (["train-00000-of-00002.csv", "train-00001-of-00002.csv.gz"], {"train": 2}),
        (["train-0-of-2.csv", "train-1-of-2.csv", "dev-0-of-1.csv"], {"train": 2, "validation": 1}),
        (["dev.tsv-0-of-2", "dev.tsv-1-of-2", "b/a-0-of-1.csv"], {"validation": 2, "b": 1}),
        (["train-0-of-1.csv", "train-0-of-1.tsv"], None),
        (["train-0-of-1.csv", "train-0-of-2.tsv", "train-1-of-2.tsv"], None),
        (["train.csv", "train-0-of-1.tsv"], None),
        (["train.csv", "Train.tsv"], None),
        (
            ["Train.csv", "DEV.tsv", "Validation_matched/a.csv", "Test.csv", "My.csv"],
            {"train": 1, "validation": 2, "test": 1, "My": 1},
        ),
        (
            ["train/x/a.csv", "train/y/a.csv", "dev.tsv", "b/a.csv"],
            {"train": 2, "validation": 1, "b": 1},
        ),
    ],
)
def test_files_that_stand_for_the_same_rows_are_refused(tmp_path, names, splits):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if splits is None:
        with pytest.raises(errors.UserError, match=r"hold the same rows of split=.*read twice"):
            tables.find_splits(tmp_path)
    else:
        found = tables.find_splits(tmp_path)
        assert {split: len(files) for split, files in found.items()} == splits


@pytest.mark.parametrize("name", ["dev.json", "validation.parquet", "valid-00000-of-00001.txt"])
def test_rows_of_train_are_not_held_out_in_place_of_a_file_that_is_not_read(tmp_path, caplog, name):
    for each in ("train.jsonl", name):
        (tmp_path / each).touch()
    with pytest.raises(errors.UserError, match=rf"{name}' is .* but of no known kind; convert"):
        tables.find_splits(tmp_path)
    (tmp_path / "dev.jsonl").touch()
    (tmp_path / "README.md").touch()
    assert tables.find_splits(tmp_path).keys() == {"train", "validation"}
    assert f"1 files are not read, such as '{tmp_path}/{name}' of split=" in caplog.text


def test_files_may_end_in_capitals(tmp_path):
    write_rows(tmp_path / "A.JSONL", ROWS)
    task = text_classification(str(tmp_path / "A.JSONL"), LABELS, validation_fraction=0)
    assert len(texts(task)) == 3


def test_splits_are_named_alike_in_folders_and_mappings(folder):
    path = pathlib.Path(folder)
    named = {"Train": path / "train.jsonl.gz", "dev": path / "dev.jsonl", "other": path}
    assert list(tables.find_splits(named)) == ["train", "validation", "other"]
    # Rows of "train" are not held out in place of those that are named.
    task = paper_task("sst2", {name: named[name] for name in ("Train", "dev")})
    assert texts(task, "validation") == texts(paper_task("sst2", folder), "validation")
    with pytest.raises(errors.UserError, match=r"names a split twice; .*\['validation', 'dev', "):
        tables.find_splits({"dev": path, "Validation": path})


def test_no_split_at_all_is_told():
    with pytest.raises(errors.UserError, match=r"path=\{\} names no split"):
        text_classification({}, LABELS)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1], ["1", "0", "1"]),
        ({"0": 0, "1": 1}, ["1", "0", "1"]),
        ({0: "no ", " 1": "yes\n"}, ["yes", "no", "yes"]),
    ],
)
def test_labels_are_read_as_texts_without_blanks_around_them(tmp_path, labels, expected):
    rows = [{"text": "x", "label": label} for label in (1, "0", "1 ")]
    path = write_rows(tmp_path / "train.jsonl", rows)
    task = text_classification(path, labels, validation_fraction=0)
    found = [task.postprocess_fn(label) for _, label in texts(task)]
    assert found == expected
    assert task.predict_metric_fns[0](found, found)["accuracy"] == 100.0
    ranked = text_classification(path, labels, validation_fraction=0, rank=True)
    right = [e for e in examples(ranked) if e["is_correct"]]
    assert [e["targets_pretokenized"].decode() for e in right] == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("yes", "labels='yes' of text_classification is one text"),
        (["yes", " "], "must be two or more different texts"),
        (["yes", "yes "], "names one twice"),
        (["yes", None], "holds None"),
        ({"0": ["no"], "1": "yes"}, r"holds \['no'\]"),
        ({"0": "yes", "1": "yes "}, "must be two or more different texts"),
    ],
)
def test_labels_that_are_no_different_texts_are_refused(folder, labels, message):
    with pytest.raises(errors.UserError, match=message):
        text_classification(folder, labels)


def test_labels_that_the_vocabulary_takes_for_one_are_refused(folder, shared_data):
    vocabulary = vocabularies.sentencepiece(str(shared_data / "vocab" / "seqio_test.model"))
    with pytest.raises(errors.UserError, match=r"'正面' and '负面' of .*seqio_test\.model"):
        text_classification(folder, ["正面", "负面"], vocabulary=vocabulary)
    assert text_classification(folder, ["正面", "负面"])


def test_columns_are_many_or_named_twice(tmp_path):
    names = [f"c{number}" for number in range(50_000)]
    for suffix, mark in ((".csv", ","), (".tsv", "\t")):
        file = tmp_path / f"rows{suffix}"
        file.write_text(f"{mark.join(names)}\n{mark.join(names)}\n")
        started = time.process_time()
        (row,) = tables.read_rows(str(file))
        assert row.text("c7") == "c7"
        assert time.process_time() - started < 10
        with pytest.raises(errors.UserError, match=r"setting columns names the column 'c1' twice"):
            list(tables.read_rows(str(file), ["c1", "c2", "c1"]))


@pytest.mark.parametrize("name", ["my-reviews", "my reviews", "a/b", ""])
def test_names_that_seqio_refuses_are_refused_before(folder, name):
    make = [
        lambda: text_classification(folder, LABELS, name=name),
        lambda: generation.summarization(folder, name=name),
        lambda: cogs.cogs(folder, name=name),
        lambda: squad.squad(folder, name=name),
        lambda: pretraining.text_span_corruption(str(folder), name=name),
        lambda: denoising.prefix_lm(pretraining.pydoc_span_corruption(), name=name),
        lambda: synthetic.gap_copy(name=name),
    ]
    for each in make:
        with pytest.raises(errors.UserError, match=r"name='.*' of a task must consist of letters"):
            each()


def test_an_input_has_a_field(folder):
    with pytest.raises(errors.UserError, match=r"each of text_field=\[\], one or more, in braces"):
        text_classification(folder, LABELS, text_field=[])


def test_fields_may_have_any_name_but_that_of_the_answer(tmp_path):
    row = '{"Review Text": "fine", "star-rating": "good", "label": "a label"}\n'
    (tmp_path / "train.jsonl").write_text(row * 2)

    def task(text_field, label_field="star-rating"):
        return text_classification(
            str(tmp_path), ["bad", "good"], text_field=text_field, label_field=label_field,
            validation_fraction=0,
        )  # fmt: skip

    (first, _) = task("Review Text").get_dataset(None, "train", shuffle=False).as_numpy_iterator()
    expected = b"text_classification Review Text: fine"
    assert (first["inputs_pretokenized"], first["targets_pretokenized"]) == (expected, b"good")
    with pytest.raises(errors.UserError, match="holds 'label', a name that convt5"):
        task("label")
    with pytest.raises(errors.UserError, match="inputs would contain the answer"):
        task("Review Text", "Review Text")


@pytest.mark.parametrize("shares", [(1, 1), (1, 4), (7, 3), (1, 0)])
def test_every_label_becomes_as_frequent_as_the_most_frequent_one(tmp_path, shares):
    rows = [
        {"text": f"{label} {n}", "label": label}
        for label, count in zip(("bad", "good"), shares, strict=True)
        for n in range(count)
    ]
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    plain, balanced = (
        text_classification(tmp_path, ["bad", "good"], validation_fraction=0, balance=balance)
        for balance in (False, True)
    )
    assert texts(balanced, "test") == texts(plain, "test")
    read = collections.Counter(texts(balanced))
    assert read.keys() == set(texts(plain))
    by_label = collections.Counter()
    for (inputs, label), count in read.items():
        by_label[label] += count
        share = max(shares) / shares[label == "good"]
        assert math.floor(share) <= count <= math.ceil(share), inputs
    assert set(by_label.values()) == {max(shares)}
    assert balanced.source.fingerprint() != plain.source.fingerprint()


def test_rows_that_are_held_out_are_not_repeated_in_training(tmp_path):
    rows = [{"text": str(n), "label": "good" if n % 5 else "bad"} for n in range(50)]
    write_rows(tmp_path / "train.jsonl", rows)
    task = text_classification(tmp_path, ["bad", "good"], validation_fraction=0.1, balance=True)
    held_out = texts(task, "validation")
    assert len(held_out) == len(set(held_out)) == 5
    assert not {*held_out} & {*texts(task)}


def test_rows_of_prepared_data_are_not_repeated():
    with pytest.raises(errors.UserError, match="balance=True of sst2 repeats rows of local files"):
        paper_task("sst2", balance=True)


def test_texts_with_and_without_spaces_around_punctuation_become_one(tmp_path):
    written = [
        {"text": text, "label": "good"}
        for text in ("It's a film, I say.", "It ' s a film , I say .")
    ]
    write_rows(tmp_path / "train.jsonl", written)
    settings = {"validation_fraction": 0, "name": "film"}
    task = text_classification(tmp_path, ["bad", "good"], space_punctuation=True, **settings)
    assert {inputs for inputs, _ in texts(task)} == {"film text: It ' s a film , I say . "}
    (format,) = formats.of(task)
    assert format.write({"text": "It's a film, I say."}) == "film text: It ' s a film , I say . "
    assert "with spaces around punctuation" in format.described()
    plain = text_classification(tmp_path, ["bad", "good"], **settings)
    assert len({inputs for inputs, _ in texts(plain)}) == 2
    changed = task_format.differences(formats.of(plain), formats.of(task))
    assert changed == [(*formats.of(plain), format)]


@pytest.mark.parametrize(
    "name", ["dev-v1.1.jsonl", "Dev_hard.csv", "valid-2/a.jsonl", "val2.jsonl", "eval.csv"]
)
def test_rows_of_train_are_not_held_out_beside_files_that_are_meant_for_it(tmp_path, name):
    write_rows(tmp_path / "train.jsonl", ROWS)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_rows(tmp_path / name, ROWS)
    with pytest.raises(
        errors.UserError, match=r"but none of split='validation', for which rows of"
    ):
        text_classification(tmp_path, LABELS)
    assert len(text_classification(tmp_path, LABELS, validation_fraction=0).splits) == 2
    for other in ("developers", "values", "evaluators", "test"):
        (tmp_path / name).rename(tmp_path / f"{other}.jsonl")
        assert "validation" in text_classification(tmp_path, LABELS).splits
        (tmp_path / f"{other}.jsonl").rename(tmp_path / name)
