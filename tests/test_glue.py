"""GLUE and summaries from local files: written as T5 writes them, in every layout people have."""

import functools
import json

import numpy as np
import pytest
import task_examples
from convt5.tasks import generation, glue
from convt5.tasks.glue import CLASSIFICATIONS
from quick import quick

from convt5 import data, errors, evaluation
from convt5.configuration import gin_config

PAIR = {"sentence1": "A cat sat .", "sentence2": 'It\'s a cat, "sat"'}
SENTENCE = {"sentence": "They drank the pub dry."}
FIELDS = {
    "cola": SENTENCE,
    "sst2": SENTENCE,
    "mrpc": PAIR,
    "qqp": {"question1": "Why?", "question2": "Why is that ?"},
    "stsb": PAIR,
    "mnli": {"premise": "A cat sat .", "hypothesis": "It sat."},
    "qnli": {"question": "Who sat?", "sentence": "A cat sat ."},
    "rte": PAIR,
    "wnli": PAIR,
}
QUICK_NAMES = quick(list(FIELDS), chosen=["sst2", "stsb", "mnli"])
LABELS = {
    "sst2": ("negative", "positive"),
    "mnli": ("entailment", "neutral", "contradiction"),
    **{name: task.labels for name, task in CLASSIFICATIONS.items()},
}
# Header (None where GLUE's file has none) and rows, as GLUE publishes them.
PUBLISHED = {
    "cola": (None, "gj04\t1\t\t{sentence}"),
    "sst2": ("sentence\tlabel", "{sentence}\t1"),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\t{sentence1}\t{sentence2}"),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "1\t2\t3\t{question1}\t{question2}\t1",
    ),
    "stsb": (
        "index\tgenre\tsource1\tsentence1\tsentence2\tscore",
        "0\tnews\tnone\t{sentence1}\t{sentence2}\t3.750",
    ),
    "mnli": (
        "index\tpairID\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t7n\t{premise}\t{hypothesis}\tneutral\tneutral",
    ),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\t{question}\t{sentence}\tnot_entailment"),
    "rte": ("index\tsentence1\tsentence2\tlabel", "0\t{sentence1}\t{sentence2}\tnot_entailment"),
    "wnli": ("index\tsentence1\tsentence2\tlabel", "0\t{sentence1}\t{sentence2}\t1"),
}


def texts(task, split="train"):
    return [
        tuple(example[f"{name}_pretokenized"].decode() for name in ("inputs", "targets"))
        for example in task_examples.examples(task, split)
    ]


def read(name, path, **settings):
    return glue.glue(name, str(path), validation_fraction=0, **settings)


def write_json(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(name):
    return "3.8" if name == "stsb" else LABELS[name][1]


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_inputs_and_targets_are_those_of_t5(tmp_path, name):
    t5 = pytest.importorskip("t5.data.preprocessors")
    tf = pytest.importorskip("tensorflow")
    labels = [0.3, 2.5, 3.75] if name == "stsb" else range(len(LABELS[name]))
    rows = [{**FIELDS[name], "label": label, "idx": i} for i, label in enumerate(labels)]
    found = texts(read(name, write_json(tmp_path / "train.jsonl", rows)))
    preprocess = (
        t5.stsb
        if name == "stsb"
        else functools.partial(t5.glue, benchmark_name=name, label_names=LABELS[name])
    )
    dataset = tf.data.Dataset.from_tensor_slices(
        {key: [row[key] for row in rows] for key in rows[0]}
    )
    expected = [
        (x["inputs"].decode(), x["targets"].decode())
        for x in preprocess(dataset).as_numpy_iterator()
    ]
    assert found == expected


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_files_as_glue_publishes_them_are_read(tmp_path, name):
    header, row = PUBLISHED[name]
    lines = ([header] if header else []) + [row.format(**FIELDS[name])] * 2
    file = "dev_matched" if name == "mnli" else "dev"
    (tmp_path / f"{file}.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tNo answer is published.\n")
    task = read(name, tmp_path)
    config = data.DataConfig(
        mixture=task, split="validation", batch_size=1, encoder_length=8, decoder_length=8
    )
    config.check_rows()  # As a dry run does.
    given = {**FIELDS[name], "label": 3.75 if name == "stsb" else 1}
    expected = texts(read(name, write_json(tmp_path / "rows.jsonl", [given] * 2)))
    assert texts(task, "validation") == expected
    assert {target for _, target in expected} == {answer(name)}


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_labels_may_be_names_and_rows_without_an_answer_are_left_out(tmp_path, name):
    values = [3.8, -1] if name == "stsb" else [LABELS[name][1], -1]
    rows = [{**FIELDS[name], "label": value} for value in values]
    (found,) = texts(read(name, write_json(tmp_path / "train.jsonl", rows)))
    assert found[1] == answer(name)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("cola", {"matthews_corrcoef", "accuracy", "f1", "macro_f1"}),
        ("mrpc", {"accuracy", "f1", "macro_f1"}),
        ("qqp", {"accuracy", "f1", "macro_f1"}),
        ("stsb", {"pearson_corrcoef", "spearman_corrcoef", "invalid"}),
        ("mnli", {"accuracy", "macro_f1"}),
    ],
)
def test_each_task_has_the_metrics_of_glue(tmp_path, name, metrics):
    path = write_json(tmp_path / "train.jsonl", [{**FIELDS[name], "label": 1}])
    task = read(name, path)
    targets = [1.0, 2.0] if name == "stsb" else list(LABELS[name][:2])
    found = {}
    for function in task.predict_metric_fns:
        found |= function(targets, list(map(str, targets)))
    assert found.pop("invalid") == 0.0
    assert found.keys() == metrics - {"invalid"}
    if name != "mnli":  # One of whose labels occurs nowhere.
        assert list(found.values()) == pytest.approx([100.0] * len(found))
    if name == "cola":
        ranked = read(name, path, rank=True)
        assert [f.keywords["metric_fns"] for f in ranked.score_metric_fns] == [
            (glue.metrics.matthews_corrcoef,)
        ]


@pytest.mark.parametrize("name", ["cola", "stsb"])
def test_a_gin_file_reads_each_task(tmp_path, name):
    write_json(tmp_path / "train.jsonl", [{**FIELDS[name], "label": 1}] * 10)
    bindings = [f"DATA={tmp_path}", "glue.glue.vocabulary=@vocabularies.characters()"]
    config = gin_config.load(
        [f"gin/tasks/{name}.gin"],
        [*bindings, "VOCABULARY=bytes"],
        roots=["@convt5.evaluation.EvalConfig"],
    )
    tasks = config.arguments(evaluation.EvalConfig)["tasks"]
    assert [task.name for task in tasks] == [name, f"{name}_rank"][: 1 + (name != "stsb")]
    assert texts(tasks[0], "validation")[0] == texts(tasks[0])[0]


@pytest.mark.slow
def test_the_second_form_of_wnli_is_that_of_t5(tmp_path):
    pytest.importorskip("t5.data.preprocessors")
    rows = [
        ("The fish ate the worm. It was tasty.", "The worm was tasty.", 0),
        ("Lily spoke to Donna breaking her silence.", "Lily spoke breaking Donna's silence.", 1),
    ]  # fmt: skip
    lines = ["index\tsentence1\tsentence2\tlabel", *(f"0\t{a}\t{b}\t{n}" for a, b, n in rows)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join([*lines, "2\tHe.\tHe.\t-1"]) + "\n")
    task = read("wnli_simple", tmp_path)
    assert list(task.splits) == ["validation"]
    assert texts(task, "validation") == [
        ("wsc: The fish ate the worm. *It* was tasty.", "The worm"),
        ("wsc: Lily spoke to Donna breaking *her* silence.", "Donna"),
    ]
    examples = list(task.get_dataset(None, "validation", shuffle=False).as_numpy_iterator())
    targets = [task.postprocess_fn("", example=e, is_target=True) for e in examples]
    answers = [task.postprocess_fn("Donna", example=e) for e in examples]
    assert (targets, answers) == ([0, 1], [0, 1])
    assert task.predict_metric_fns[0](targets, answers) == {"accuracy": 100.0}
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tlabel\nA cat.\tA cat.\t1\n")
    with pytest.raises(errors.UserError, match=r"line 2 has none of .* under 'sentence1'"):
        texts(read("wnli_simple", tmp_path), "validation")


def test_scores_are_written_as_t5_writes_them():
    tf = pytest.importorskip("tensorflow")
    scores = np.arange(0, 501, dtype=np.float32) / 100
    expected = tf.as_string(tf.round(scores * 5) / 5, precision=1).numpy()
    assert [glue.score_text(float(score)).encode() for score in scores] == expected.tolist()


def test_a_score_becomes_a_number_where_it_is_the_target(tmp_path):
    task = read("stsb", write_json(tmp_path / "train.jsonl", [{**PAIR, "label": 5}]))
    assert task.postprocess_fn("5.0", is_target=True, example={}) == 5.0
    assert task.postprocess_fn("much", is_target=False, example={}) == "much"


@pytest.mark.parametrize("label", ["a lot", 5.1, -0.5, "nan"])
def test_a_score_that_is_none_is_named_by_file_and_line(tmp_path, label):
    path = write_json(tmp_path / "train.jsonl", [{**PAIR, "label": 1}, {**PAIR, "label": label}])
    with pytest.raises(errors.UserError, match=rf"line 2 has '{label}' .* a score of 0 to 5"):
        texts(read("stsb", path))


def test_broken_lines_of_qqp_are_left_out_and_counted(tmp_path, caplog):
    header, row = PUBLISHED["qqp"]
    (tmp_path / "train.tsv").write_text("\n".join([header, "1\t2\t3\tWhy", row, "4\t5"]) + "\n")
    with caplog.at_level("WARNING", logger="absl"):
        assert len(texts(read("qqp", tmp_path))) == 1
    assert "2 lines are left out for another number of columns than 6" in caplog.text
    assert "line 2" in caplog.text
    (tmp_path / "rte.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\tx\n")
    with pytest.raises(errors.UserError, match="line 2 has 2 columns, not 4"):
        texts(read("rte", tmp_path / "rte.tsv"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "stsb", "rank": True}, "rank=True chooses among labels, and name='stsb'"),
        ({"name": "wnli_simple", "rank": True}, "name='wnli_simple' has texts for answers"),
        ({"name": "colla"}, "name='colla' is none of the tasks of GLUE.* Did you mean cola"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path, settings, message):
    path = write_json(tmp_path / "train.jsonl", [{**PAIR, "label": 1}])
    with pytest.raises(errors.UserError, match=message):
        glue.glue(path=str(path), **settings)


# --- Summaries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("document", "summary"), ("article", "highlights")])
def test_summaries_are_written_as_t5_writes_them(tmp_path, names):
    t5 = pytest.importorskip("t5.data.preprocessors")
    tf = pytest.importorskip("tensorflow")
    row = dict(zip(names, ("A long story .", "Short and good ."), strict=True))
    task = generation.summarization(str(write_json(tmp_path / "train.jsonl", [row] * 2)))
    dataset = tf.data.Dataset.from_tensors(row)
    (expected,) = t5.summarize(dataset, *names).as_numpy_iterator()
    pair = (expected["inputs"].decode(), expected["targets"].decode())
    assert texts(task) == [pair] * 2
    (rouge,) = task.predict_metric_fns
    assert set(rouge(["Short and good ."], ["Short and good ."]).values()) == {100.0}


def test_a_row_without_a_summary_is_named(tmp_path):
    path = write_json(tmp_path / "train.jsonl", [{"document": "x", "summary": ""}])
    with pytest.raises(errors.UserError, match="line 1 has nothing under 'summary'"):
        texts(generation.summarization(str(path)))


def test_fields_have_any_name_and_rows_are_held_out(tmp_path):
    rows = [{"text": f"story {i}", "tldr": "x"} for i in range(20)]
    task = generation.summarization(
        str(write_json(tmp_path / "train.jsonl", rows)),
        document_field="text",
        summary_field="tldr",
        validation_fraction=0.1,
    )
    assert len(texts(task, "validation")) == 2
