"""COGS is read as published, and its results are told apart by category."""

import pytest
from convt5.tasks import cogs
from task_examples import examples

from convt5 import errors

TRAIN = "A dog ran .\tdog ( x _ 1 ) AND run . agent ( x _ 2 , x _ 1 )\tin_distribution\n"
GEN = (
    "The cat slept .\t* cat ( x _ 1 ) ; sleep . agent ( x _ 2 , x _ 1 )\tsubj_to_obj_common\n"
    "A cat said that a dog ran .\tcat ( x _ 1 )\tcp_recursion\n"
    "A cat on a mat ran .\tcat ( x _ 1 ) AND mat ( x _ 4 )\tpp_recursion\n"
)


@pytest.fixture
def task(tmp_path):
    for name, text in {"train": TRAIN, "dev": TRAIN, "test": TRAIN, "gen": GEN}.items():
        (tmp_path / f"{name}.tsv").write_text(text)
    return cogs.cogs(str(tmp_path))


def measured(task, split, predictions):
    targets = [
        task.postprocess_fn(e["targets_pretokenized"].decode(), example=e, is_target=True)
        for e in examples(task, split)
    ]
    predictions = [task.postprocess_fn(p, example={}, is_target=False) for p in predictions]
    (metric,) = task.predict_metric_fns
    return metric(targets, predictions)


def test_the_published_tables_have_no_header(task):
    assert set(task.splits) == {"train", "validation", "test", "gen"}
    (example,) = examples(task, "train")
    assert example["inputs_pretokenized"] == b"A dog ran ."
    assert example["targets_pretokenized"].endswith(b"run . agent ( x _ 2 , x _ 1 )")
    assert example["category"] == b"in_distribution"


def test_generalisation_is_reported_by_category_and_kind(task):
    forms = [e["targets_pretokenized"].decode() for e in examples(task, "gen")]
    assert measured(task, "gen", [forms[0], "cat", forms[2].replace(" ( ", "  ( ")]) == {
        "exact_match": pytest.approx(200 / 3),
        "exact_match/structural": 50.0,
        "exact_match/lexical": 100.0,
        "exact_match/cp_recursion": 0.0,
        "exact_match/pp_recursion": 100.0,
        "exact_match/subj_to_obj_common": 100.0,
    }


def test_one_category_has_one_number(task):
    form = TRAIN.split("\t")[1]
    assert measured(task, "test", [form]) == {"exact_match": 100.0}


def test_a_line_without_category_is_named(tmp_path):
    (tmp_path / "train.tsv").write_text("A dog ran .\tdog ( x _ 1 )\n")
    with pytest.raises(errors.UserError, match="line 1 has 2 columns, not 3"):
        examples(cogs.cogs(str(tmp_path)), "train")


def test_real_logical_forms_of_all_categories_are_read(shared_data):
    task = cogs.cogs(str(shared_data / "cogs"))
    rows = [task.source._table(split) for split in ("test", "gen")]
    assert [len(table["text"]) for table in rows] == [3000, 10500]
    categories = set(rows[1]["category"].numpy().tolist())
    assert len(categories) == 21
    assert {name.encode() for name in cogs.STRUCTURAL} <= categories


def test_a_header_line_is_no_sentence(tmp_path):
    (tmp_path / "train.csv").write_text("text,target,category\nA dog ran .,dog,primitive\n")
    (example,) = examples(cogs.cogs(str(tmp_path)), "train")
    assert example["inputs_pretokenized"] == b"A dog ran ."
