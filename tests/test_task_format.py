"""A model is asked what it was trained on: predictions write inputs as the task's training does."""

import functools
import io
import json
import math
import pathlib
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import seqio
import task_examples
import tensorflow as tf
import tensorflow_datasets as tfds
import tiny_run
from convt5.tasks import classification, formats, squad, synthetic, vocabularies
from quick import quick

import convt5
from convt5 import errors, evaluation, infer
from convt5.configuration import gin_config
from convt5.evaluation import run_settings, stream
from convt5.evaluation.evaluator import Evaluator
from convt5.evaluation.predictor import Predictor
from convt5.evaluation.settings import PredictConfig, Rank
from convt5.generation.search import Greedy
from convt5.text import task_format
from convt5.text.task_format import Field, TaskFormat, of_template

ROOT = pathlib.Path(__file__).resolve().parents[1]
BYTES = vocabularies.characters()
TRICKY = "  Who's <extra_id_0>\t{text} “the” (best)  \\1 $1 film?\u00a0 "
PAIR = of_template("pairs", "pairs second: {second} first: {first}", strip=True)
LABELED = of_template("kinds", "kinds of: {text}", labels=("no", "yes", "maybe so"))
(MARKED,) = task_format.as_json([of_template("marked", "{a} {b}", mark_shared=True)])
LENGTHS = {"max_length": 12, "max_input_length": 64}


ROWS = {
    "mnli": {"premise": TRICKY, "hypothesis": "It: is."},
    "squad": {"context": TRICKY, "question": "Who (is)?", "answers": ["film"]},
    "cogs": {"text": TRICKY, "target": "who ( x )", "category": "plain"},
}
PAIR_OF_SENTENCES = {"sentence1": TRICKY, "sentence2": "b"}
QUESTION = {"question": TRICKY, "sentence": "b"}
ROWS |= {
    **dict.fromkeys(["mrpc", "rte", "wnli", "stsb"], PAIR_OF_SENTENCES),
    "cola": {"sentence": TRICKY},
    "qnli": QUESTION,
    "qqp": {"question1": TRICKY, "question2": "b"},
    "summarization": {"document": TRICKY, "summary": "b"},
}
LABELS = {
    "civil_comments_spans": ["toxic"],
    "listops": ["3"],
    "text_classification": ["good"],
    "wiki_toxicity": ["toxic"],
}
WITHOUT_LABELS = ("cogs", "squad", "stsb", "summarization")
OTHERS = {"text_classification": ["LABELS=['bad', 'good']"]}


@pytest.fixture(scope="module")
def model():
    return tiny_run.make_model()


def predictor(model, format=None, **settings) -> Predictor:
    raw = settings.pop("raw", False)
    config = PredictConfig(**{**LENGTHS, "batch_size": 4, **settings})
    return Predictor(model, BYTES, config, format=format, raw=raw)


def first_example(task, split="validation"):
    return task_examples.examples(task, split, num=1)[0]


@hypothesis.given(st.lists(st.text(), min_size=1, max_size=20))
@hypothesis.settings(max_examples=10, deadline=None)
def test_training_and_prediction_space_punctuation_alike(texts):
    format = of_template("qa", "question: {a} context: {a}", space_punctuation=True)
    texts = [text for text in texts if text.isprintable() or "\n" in text] or ["x"]
    texts = [text.encode(errors="ignore").decode() for text in texts]
    trained = format.write(
        {"a": tf.constant(texts)}, join=tf.strings.join, replace=tf.strings.regex_replace
    )
    assert [text.decode() for text in trained.numpy()] == [format.write({"a": x}) for x in texts]


@pytest.mark.parametrize(
    ("before", "text", "marked"),
    [
        ("Who founded the Bank?", "The bank was founded.", "The * bank was * founded."),
        ("elected khan", "(Election) of the khan's heir", "(* Election) of the * khan's heir"),
        ("In 1694, who did?", "in 1694 who did", "in * 1694 who did"),
        ("", "nothing before", "nothing before"),
        ("Stra\u00dfe", "STRASSE", "* STRASSE"),
        ("a_b * _", "* a_b\n", "* a_b\n"),
    ],
)
def test_words_that_two_texts_share_are_marked_in_the_second(before, text, marked):
    assert task_format.mark_shared(before, text) == marked


@hypothesis.given(st.text(), st.text())
def test_marks_only_add_to_a_text(before, text):
    marked = task_format.mark_shared(before, text)
    assert marked.replace("* ", "") == text.replace("* ", "")
    assert task_format.mark_shared("", text) == text


def test_words_are_marked_in_predictions_as_in_training(model, tmp_path):
    row = ROWS["squad"] | {"question": "Whose film, \u201cthe\u201d best?", "context": TRICKY}
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = squad.squad(tmp_path, BYTES, mark_shared=True)
    (format,) = formats.of(task)
    assert task_format.from_json(task_format.as_json([format])) == (format,)
    asked = predictor(model, format)
    written = BYTES.decode(asked.encode(row))
    assert "* film ?" in written
    assert asked.encode(row) == first_example(task)["inputs"].tolist()
    (plain,) = formats.of(squad.squad(tmp_path, BYTES))
    assert "*" not in BYTES.decode(predictor(model, plain).encode(row))
    by_fields = of_template("three", "{a} {b} {c}", mark_shared=True)
    fields = {"a": "some words", "b": "other words", "c": "others, some"}
    assert by_fields.write(fields) == "some words other * words * others, * some"


class TestTasks:
    @pytest.mark.parametrize(
        "name",
        quick(
            [path.stem for path in sorted((ROOT / "gin" / "tasks").glob("*.gin"))],
            chosen=["sst2", "squad", "cogs", "summarization", "stsb", "mnli"],
        ),
    )
    def test_a_row_of_a_file_is_asked_as_it_was_trained(self, model, tmp_path, name):
        paper = classification.PAPER_TASKS.get(name)
        (label, *_) = paper.labels if paper else LABELS.get(name, ["0"])
        row = {**ROWS.get(name, {"text": TRICKY}), "label": label}
        for split in ("train", "dev"):
            (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        bindings = [f"DATA={tmp_path}", "VOCABULARY=bytes", *OTHERS.get(name, [])]
        config = gin_config.load(
            [f"gin/tasks/{name}.gin"], bindings, roots=["@convt5.evaluation.EvalConfig"]
        )
        for task in config.arguments(evaluation.EvalConfig)["tasks"]:
            (format,) = formats.of(task)
            example = first_example(task)
            asked = predictor(model, format)
            assert asked.encode(row) == example["inputs"].tolist()
            if len(format.fields) == 1:
                assert asked.encode(row[format.fields[0]]) == example["inputs"].tolist()
            assert bool(format.labels) == (name not in WITHOUT_LABELS)
            assert task_format.from_json(task_format.as_json([format])) == (format,)

    @pytest.mark.parametrize(
        "name", quick([*classification.PAPER_TASKS, "squad"], chosen=["sst2", "squad"])
    )
    def test_an_example_of_tfds_is_asked_as_it_was_trained(self, model, name):
        make = squad.squad if name == "squad" else classification.paper_task
        task = make(**({} if name == "squad" else {"name": name}), vocabulary=BYTES)
        (format,) = formats.of(task)
        for registered in (name, *([] if name == "squad" else [f"{name}_rank"])):
            assert formats.of(seqio.get_mixture_or_task(registered)) == (format,)
        with tfds.testing.mock_data(num_examples=4):
            rows = task.source.get_dataset("validation", shuffle=False)
            if name != "squad":
                rows = task.preprocessors[0](rows)
            row = {k: v.numpy() for k, v in next(iter(rows)).items() if k in format.fields}
            example = first_example(task)
        given = {field: value.decode() for field, value in row.items()}
        assert predictor(model, format).encode(given) == example["inputs"].tolist()

    @pytest.mark.parametrize(
        "name",
        [
            "listops",
            "gap_copy",
            "gap_reverse",
            "associative_recall",
            "lookback",
            "pointer_hops",
            "entailment",
        ],
    )
    def test_an_example_made_by_code_is_asked_as_it_was_trained(self, model, name):
        task = seqio.get_mixture_or_task(name)
        (format,) = formats.of(task)
        text = task.source.example("validation", 0).inputs
        assert predictor(model, format).encode(text) == first_example(task)["inputs"].tolist()

    def test_pre_training_takes_texts_with_sentinels_as_they_are(self, model):
        pretraining = [
            name
            for name in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names())
            if name.startswith(("pydoc_", "c4_"))
        ]
        assert len(pretraining) >= 6
        for name in pretraining:
            for format in formats.of(seqio.get_mixture_or_task(name)):
                assert format.is_plain
                assert format.sentinels
                assert not format.labels
        (format, *_) = formats.of(seqio.get_mixture_or_task("pydoc_span_corruption"))
        text = " one <extra_id_0> two\t"
        assert predictor(model, format).encode(text) == predictor(model).encode(text)

    def test_of_a_task_with_its_own_code_it_is_said_that_it_is_not_known(self):
        task = tiny_run.add_task("tiny_own_code")
        (format,) = formats.of(task)
        assert format.parts is None
        assert "task=tiny_own_code is unknown" in format.described()
        assert "(rename)" in format.described()

    def test_a_task_of_ones_own_names_its_format(self, model, tmp_path):
        (tmp_path / "a.tsv").write_text("a film\tgood\n")
        feature = seqio.Feature(BYTES, add_eos=True)
        format = of_template("own", "review: {review} verdict:")

        @seqio.map_over_dataset
        def parse(line):
            parts = tf.strings.split(line, "\t")
            return {"review": parts[0], "targets": parts[1]}

        task = seqio.Task(
            "own",
            source=seqio.TextLineDataSource({"validation": str(tmp_path / "a.tsv")}),
            preprocessors=[
                parse,
                functools.partial(formats.write_inputs, format=format),
                seqio.preprocessors.tokenize,
                seqio.preprocessors.append_eos,
            ],
            output_features={"inputs": feature, "targets": feature},
        )
        assert formats.of(task) == (format,)
        asked = predictor(model, format).encode("a film")
        assert asked == first_example(task)["inputs"].tolist()


class TestFields:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("alone", r"input 1 is one text, but task=pairs writes .* 'second' and 'first'"),
            ({"first": "a"}, r"input 1 has no field 'second', but \['first'\].* and 'first'\.$"),
            ({"first": "a", "second": " "}, "input 1 has nothing in the field 'second'"),
            ({"first": math.nan, "second": "b"}, r"has nan in the field 'first', which must be t"),
            ({"first": -math.inf, "second": "b"}, r"has -inf in the field 'first', which must be"),
            ({"first": ["a"], "second": "b"}, r"has \['a'\] in the field 'first', which must be t"),
            (3, "is 3, which is neither a text"),
        ],
    )
    def test_what_does_not_fit_the_fields_is_one_message(self, model, given, message):
        with pytest.raises(errors.UserError, match=message):
            predictor(model, PAIR).predict([given])

    def test_numbers_are_texts_and_other_fields_are_left_alone(self):
        text = PAIR.text({"first": 1, "second": " b ", "label": None})
        assert text == "pairs second: b first: 1"

    def test_raw_sends_texts_as_they_are(self, model):
        written = "pairs second: b first: a"
        fields = {"first": "a", "second": "b"}
        asked = predictor(model, PAIR)
        expected = asked.predict([fields])
        assert asked.predict([written], raw=True) == expected
        raw = predictor(model, PAIR, raw=True)
        assert raw.predict([written]) == expected
        assert raw.fields == ()
        with pytest.raises(errors.UserError, match="but must be text: the model keeps"):
            raw.predict([fields])

    @pytest.mark.parametrize(
        "content",
        [
            "[",
            "[]",
            "{}",
            '{"tasks": 3}',
            '{"tasks": [{"task": "a"}]}',
            '{"tasks": [{"task": "a", "input": [3], "labels": []}]}',
            '{"tasks": [{"task": "a", "input": null, "labels": ["x", "x"]}]}',
            json.dumps({"tasks": [*task_format.as_json([PAIR]), MARKED | {"mark_shared": 1}]}),
        ],
    )
    def test_a_damaged_file_is_named(self, tmp_path, content):
        (tmp_path / "task.json").write_text(content)
        with pytest.raises(errors.UserError, match=r"task\.json, how the tasks .* cannot be read"):
            task_format.load(tmp_path)

    def test_formats_are_found_from_a_run_or_one_of_its_steps(self, tmp_path):
        assert task_format.load(tmp_path) is None
        own = TaskFormat(
            task="a",
            parts=("{text}", Field("x")),
            labels=("é", "b"),
            without_end=("targets",),
        )
        task_format.write(tmp_path, [PAIR, own])
        assert task_format.load(tmp_path / "checkpoints" / "7") == (PAIR, own)


class TestLabels:
    def test_labels_are_ranked_where_the_task_has_some(self, model):
        asked = predictor(model, LABELED)
        assert asked.strategy == Rank()
        assert predictor(model, PAIR).strategy == Greedy()
        texts = ["good", "a film", "what is it"]
        for found, text in zip(asked.predict(texts), texts, strict=True):
            scores = asked.score([text] * 3, list(LABELED.labels))
            by_label = {
                label: score.log_prob for label, score in zip(LABELED.labels, scores, strict=True)
            }
            assert found.label == found.texts[0] == max(by_label, key=lambda x: by_label[x])
            assert dict(zip(found.texts, found.scores, strict=True)) == pytest.approx(by_label)
            assert list(found.probabilities) == list(LABELED.labels)
            assert sum(found.probabilities.values()) == pytest.approx(1)
            total = sum(math.exp(score) for score in by_label.values())
            expected = {label: math.exp(score) / total for label, score in by_label.items()}
            assert found.probabilities == pytest.approx(expected, rel=1e-4)
            assert asked.predict([text])[0].label == found.label
        (generated,) = predictor(model, LABELED, strategy=Greedy()).predict(["good"])
        assert generated.label is None
        assert len(generated.texts) == 1

    @pytest.mark.slow
    def test_the_label_is_the_one_that_the_evaluator_chooses(self, model):
        def ranked(**settings):
            return synthetic.listops(rank=True, num_train=1, num_eval=5, max_length=20, **settings)

        (format,) = formats.of(ranked())
        config = PredictConfig(max_length=4, max_input_length=80, batch_size=4)
        evaluator = Evaluator(ranked(), "validation", config)
        outcome = evaluator.evaluate(evaluator.predictor(model))
        asked = Predictor(model, BYTES, config, format=format)
        texts = [record["input"] for record in outcome.records[::10]]
        found = asked.predict(texts)
        for i, prediction in enumerate(found):
            scores = [r["target_score"] for r in outcome.records[10 * i : 10 * i + 10]]
            assert prediction.label == format.labels[scores.index(max(scores))]
            assert sorted(prediction.scores) == pytest.approx(sorted(scores), rel=1e-5)
        right = [
            r["target"]
            for e, r in zip(evaluator.examples, outcome.records, strict=True)
            if e["is_correct"]
        ]
        hits = sum(p.label == truth for p, truth in zip(found, right, strict=True))
        assert outcome.metrics["accuracy"] == pytest.approx(100 * hits / 5)

    def test_labels_that_cannot_be_ranked_are_refused(self, model):
        with pytest.raises(errors.UserError, match="the model keeps no task with labels"):
            predictor(model, PAIR, strategy=Rank())
        alike = of_template("alike", "{text}", labels=("positive", "positively"))
        with pytest.raises(errors.UserError, match="are the same ids in max_length=4 tokens"):
            predictor(model, alike, max_length=4)
        twice = of_template("twice", "{text}", labels=("good", "good"))
        with pytest.raises(errors.UserError, match="'good' and 'good' are the same ids"):
            predictor(model, twice, max_length=8)

    def test_very_many_labels_are_compared_at_once(self, model):
        many = of_template("many", "{text}", labels=tuple(map(str, range(50_000))))
        started = time.process_time()
        assert predictor(model, many, max_length=8)
        assert time.process_time() - started < 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of tiny models: of a task with labels, of one with two fields, and of both."""
    tiny_run.add_task("tiny_infer")
    made = {}
    for name, kept in {"kinds": [LABELED], "pairs": [PAIR], "both": [LABELED, PAIR]}.items():
        folder = tmp_path_factory.mktemp(name)
        tiny_run.write_run(folder, steps=(20,), task="tiny_infer")
        task_format.write(folder, kept)
        made[name] = folder
    return made


class TestCommand:
    def records(self, capsys, *argv):
        assert infer.main(list(argv)) == 0
        captured = capsys.readouterr()
        return [json.loads(line) for line in captured.out.splitlines()], captured.err

    @pytest.mark.slow
    def test_lines_get_labels_and_probabilities(self, runs, tmp_path, capsys):
        (tmp_path / "in.txt").write_text("one\ntwo\n")
        (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "two", "label": "no"}\n')
        (tmp_path / "other.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
        argv = [f"--checkpoint={runs['kinds']}", "--max_input_length=64", "--max_length=12"]
        lines, said = self.records(capsys, *argv, f"--input={tmp_path / 'in.txt'}")
        assert "inputs are written as 'kinds of: {text}', the format of task=kinds" in said
        assert "most likely of its labels ['no', 'yes', 'maybe so']" in said
        assert [line["input"] for line in lines] == ["one", "two"]
        for line in lines:
            assert list(line["probabilities"]) == ["no", "yes", "maybe so"]
            assert line["label"] == max(line["probabilities"], key=line["probabilities"].get)
            assert line["label"] == line["predictions"][0]
        assert self.records(capsys, *argv, f"--input={tmp_path / 'in.jsonl'}")[0] == lines
        fields = ["--field=q", f"--input={tmp_path / 'other.jsonl'}"]
        assert self.records(capsys, *argv, *fields)[0] == lines
        with pytest.raises(errors.UserError, match=r"line 1 has no field 'text', but .* --field"):
            infer.main([*argv, *fields[1:]])
        (tmp_path / "raw.txt").write_text("kinds of: one\nkinds of: two\n")
        raw, said = self.records(capsys, *argv, "--raw", f"--input={tmp_path / 'raw.txt'}")
        assert [r["probabilities"] for r in raw] == [line["probabilities"] for line in lines]
        assert "inputs are passed unchanged" in said
        generated, _ = self.records(
            capsys, *argv, "--strategy=greedy", f"--input={tmp_path / 'in.txt'}"
        )
        assert all("label" not in line and line["predictions"] for line in generated)
        loaded = convt5.load_predictor(runs["kinds"], max_input_length=64, max_length=12)
        assert [p.label for p in loaded.predict(["one", "two"])] == [r["label"] for r in lines]
        assert "inputs are written as" in capsys.readouterr().err

    @pytest.mark.slow
    def test_a_task_with_several_fields_takes_json_lines(self, runs, tmp_path, capsys, monkeypatch):
        rows = [{"second": "b", "first": "a", "label": "x"}, {"first": "c", "second": "d"}]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "in.txt").write_text("plain\n")
        argv = [f"--checkpoint={runs['pairs']}", "--max_input_length=64"]
        lines, _ = self.records(capsys, *argv, f"--input={tmp_path / 'in.jsonl'}")
        assert [line["input"] for line in lines] == [
            {"second": "b", "first": "a"},
            {"second": "d", "first": "c"},
        ]
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "in.jsonl").read_bytes()))
        )
        assert self.records(capsys, *argv, "--input=-")[0] == lines
        message = r"in\.txt, line 1 is not JSON .*task=pairs writes .* second and first: give JSON"
        with pytest.raises(errors.UserError, match=message):
            infer.main([*argv, f"--input={tmp_path / 'in.txt'}"])
        with pytest.raises(errors.UserError, match="field=first names one field, but task=pairs"):
            infer.main([*argv, "--field=first", f"--input={tmp_path / 'in.jsonl'}"])

    def test_a_model_of_several_tasks_is_told_which(self, runs, tmp_path):
        (tmp_path / "in.txt").write_text("one\n")
        argv = [f"--checkpoint={runs['both']}", f"--input={tmp_path / 'in.txt'}", "--dry_run"]
        with pytest.raises(errors.UserError, match="trained on several tasks, kinds, pairs"):
            infer.main(argv)
        assert infer.main([*argv, "--format=kinds"]) == 0
        assert infer.main([*argv, "--raw"]) == 0
        with pytest.raises(errors.UserError, match=r"format=pair is no task .* Did you mean pairs"):
            infer.main([*argv, "--format=pair"])
        settings = run_settings.RunSettings.unknown()
        assert run_settings.task_format(str(runs["both"]), settings, "pairs") == PAIR

    def test_a_dialogue_asks_field_by_field_and_shows_probabilities(self, model):
        typed = iter(["a", "b"])
        asked = []

        def ask(field=""):
            asked.append(field)
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        out = io.StringIO()
        pairs = predictor(model, PAIR)
        stream.converse(pairs, ask, out, fields=pairs.fields)
        (expected,) = pairs.predict([{"second": "a", "first": "b"}])
        assert out.getvalue() == f"{expected.texts[0]}\n"
        assert asked == ["second", "first", "second"]

        typed = iter(["a film"])
        out = io.StringIO()
        kinds = predictor(model, LABELED)
        stream.converse(kinds, ask, out)
        (expected,) = kinds.predict(["a film"])
        assert out.getvalue().startswith(
            f"{expected.label} {max(expected.probabilities.values()):.3f}  ("
        )
