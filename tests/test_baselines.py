"""Baselines are those of their formulas, and are told for classification only."""

import itertools
import json
import math
import random
import sys

import pytest

pytest.importorskip("seqio")

import seqio
import tensorflow as tf
from convt5.tasks import classification, cogs, metrics, pretraining, squad, synthetic, vocabularies

from convt5 import errors
from convt5.evaluation import baselines
from convt5.evaluation.baselines import Labelled


def words_and_pairs(text: str) -> list[str]:
    tokens = text.lower().split()
    return [*tokens, *map(" ".join, itertools.pairwise(tokens))]


def by_definition(train: Labelled, test: Labelled, words=words_and_pairs) -> float:
    """Naive Bayes word by word: P(label) times the product of (count + a) / (total + a words)."""
    known = {word for text in train.texts for word in words(text)}
    scores = {}
    for label in sorted(set(train.labels)):
        own = [text for text, given in zip(*train, strict=True) if given == label]
        counts = [word for text in own for word in words(text)]
        a = baselines.SMOOTHING
        total = len(counts) + a * len(known)
        scores[label] = (
            math.log(len(own) / len(train.labels)),
            {word: math.log((counts.count(word) + a) / total) for word in known},
        )

    def guess(text):
        return max(
            scores,
            key=lambda label: (
                scores[label][0] + sum(scores[label][1][w] for w in words(text) if w in known)
            ),
        )

    guesses = [guess(text) for text in test.texts]
    return sum(a == b for a, b in zip(guesses, test.labels, strict=True)) / len(guesses)


def drawn(rng, size: int) -> Labelled:
    words = ["good", "bad", "film", "plot", "the", "a", "not", "very"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 8))) for _ in range(size)]
    return Labelled(texts, [rng.choice(["yes", "no", "no", "maybe"]) for _ in range(size)])


@pytest.mark.parametrize("seed", range(5))
def test_naive_bayes_is_that_of_its_definition(seed):
    rng = random.Random(seed)
    train, test = drawn(rng, 40), drawn(rng, 60)
    assert baselines.naive_bayes(train, test) == by_definition(train, test)
    encode = vocabularies.characters().encode
    of_pieces = baselines.naive_bayes(train, test, encode=encode)
    assert of_pieces == by_definition(train, test, encode)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.naive_bayes", None)
    with pytest.raises(errors.UserError, match="pip install scikit-learn"):
        baselines.naive_bayes(Labelled(["a"], ["x"]), Labelled(["a"], ["x"]))


def test_the_majority_is_that_of_training():
    train = Labelled(["a"] * 3, ["x", "x", "y"])
    assert baselines.majority(train, Labelled(["a"] * 4, ["x", "y", "y", "y"])) == 0.25


def task(folder, **settings):
    rows = {
        "train": [("dull and long", "bad")] * 2 + [("a joy", "good")],
        "test": [("dull", "bad"), ("joy", "good"), ("joy", "good")],
    }
    for split, lines in rows.items():
        texts = [json.dumps({"text": text, "label": label}) for text, label in lines]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in texts))
    return classification.text_classification(str(folder), ["bad", "good"], **settings)


@pytest.mark.slow
def test_tasks_of_the_same_texts_share_a_row(tmp_path):
    both = [task(tmp_path), task(tmp_path, rank=True)]
    *_, row = baselines.table(both, "test").splitlines()
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["3", "33.3", "100.0"]
    assert len(baselines.table(both, "test").splitlines()) == 3
    names, *_ = baselines.table(both, "test", pieces=True).splitlines()
    assert names.rsplit("|")[-2].strip() == "naive Bayes on pieces"


def test_a_split_that_is_not_there_and_answers_in_words_are_told(tmp_path):
    with pytest.raises(errors.UserError, match=r"split=tst is none of .*Did you mean test"):
        baselines.read(task(tmp_path), "tst")
    (tmp_path / "cogs").mkdir()
    lines = [f"A dog {'barked ' * n}.\tbark {n}\tprimitive\n" for n in range(101)]
    (tmp_path / "cogs" / "train.tsv").write_text("".join(lines))
    with pytest.raises(errors.UserError, match=r"101 different targets in train; .* at most 100"):
        baselines.read(cogs.cogs(path=str(tmp_path / "cogs")), "train")


def test_text_that_is_cut_to_lengths_is_told():
    pydoc = pretraining.pydoc_span_corruption()
    with pytest.raises(errors.UserError, match=r"task=pydoc_span_corruption cuts text to fixed"):
        baselines.table([pydoc], "validation")


def test_a_task_that_only_checks_lengths_is_measured():
    task = synthetic.lookback(3, num_train=20, num_eval=10)
    _, _, row = baselines.table([task], "validation").splitlines()
    assert [cell.strip() for cell in row.split("|")[1:3]] == ["lookback", "10"]


def test_a_file_without_tasks_is_told():
    with pytest.raises(errors.UserError, match=r"sets no evaluation\.EvalConfig\.tasks"):
        baselines.main(["--gin_file=gin/models/dynamic_tiny.gin"])


def test_the_best_sentence_shares_most_words_with_the_question():
    context = (
        "The Thames froze in 1709 . In Paris , the poor ate bread of roots ! Why ? No one asked ."
    )
    for question, sentence in (
        ("What did the poor of Paris eat ?", "In Paris , the poor ate bread of roots !"),
        ("When did the thames freeze in ?", "The Thames froze in 1709 ."),
        ("Xyzzy ?", "The Thames froze in 1709 ."),
        ("one , . ?", "No one asked ."),
    ):
        assert baselines.best_sentence(question, context) == sentence


def test_questions_about_a_passage_have_the_metrics_of_the_best_sentence(tmp_path):
    context = "Ann saw Bob. Carol met Dave in Rome. Eve sleeps."
    rows = [
        {"context": context, "question": "Where did Carol meet Dave?", "answers": ["Rome"]},
        {"context": context, "question": "Does Eve?", "answers": ["no", "Eve sleeps"]},
    ]
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    names, _, row = baselines.table([squad.squad(str(tmp_path))], "test").splitlines()
    found = dict(zip(*([c.strip() for c in x.split("|")[1:-1]] for x in (names, row)), strict=True))
    assert found["examples"] == "2"
    # One of the five words "carol met dave in rome" is the answer; the other is answered exactly.
    assert float(found["best sentence: f1"]) == pytest.approx(100 * (1 / 3 + 1) / 2, abs=0.05)
    assert float(found["best sentence: em"]) == 50


def test_questions_with_labels_are_a_classification():
    texts = [f"question: is it {x} ? context: It is {x} ." for x in "ab"]
    feature = seqio.Feature(vocabularies.characters())
    asked = seqio.Task(
        "labelled_questions",
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(
                {"inputs": texts, "targets": ["a", "b"]}
            ),
            splits=["train", "test"],
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[metrics.accuracy],
    )
    *_, row = baselines.table([asked], "test").splitlines()
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["2", "50.0", "100.0"]
