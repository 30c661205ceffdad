"""Generated tasks have the answers they claim, the same ones for every host and every run."""

import json

import numpy as np
import pytest
import seqio
import task_examples
from convt5.tasks import formats, synthetic
from quick import quick

from convt5 import data, errors

TASKS = (
    synthetic.listops,
    synthetic.gap_copy,
    synthetic.gap_reverse,
    synthetic.associative_recall,
    synthetic.lookback,
    synthetic.pointer_hops,
    synthetic.entailment,
)
each_task = pytest.mark.parametrize("make", TASKS, ids=lambda make: make.__name__)
some_tasks = pytest.mark.parametrize(
    "make", quick(TASKS, chosen=[synthetic.listops, synthetic.lookback]), ids=lambda m: m.__name__
)


def texts(task, split="train", num=5, **arguments):
    return [
        (e["inputs_pretokenized"].decode(), e["targets_pretokenized"].decode())
        for e in task_examples.examples(task, split, num=num, **arguments)
    ]


def value_of(words):
    """The value of a list operation, by an independent reading; consumes the words."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    values = []
    while words[0] != "]":
        values.append(value_of(words))
    words.pop(0)
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
    return {
        "[MIN": ordered[0],
        "[MAX": ordered[-1],
        "[MED": middle,
        "[SM": sum(values) % 10,
    }[word]


def test_list_operations_have_the_values_they_say():
    source = synthetic.listops(max_depth=4, max_length=60).source
    for i in range(300):
        text, value = source.example("train", i)
        words = text.split()
        assert 4 <= len(words) <= 60
        assert str(value_of(words)) == value
        assert words == []


def test_the_reading_of_list_operations_agrees_with_published_ones(shared_data):
    import gzip

    with gzip.open(shared_data / "listops" / "test.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert all(str(value_of(row["text"].split())) == row["label"] for row in rows)


def test_depth_limits_the_nesting():
    source = synthetic.listops(max_depth=1).source
    assert all(source.example("train", i)[0].count("[") == 1 for i in range(20))


def test_copies_stand_behind_the_gap():
    for text, target in texts(synthetic.gap_copy(5, num_symbols=3)):
        assert len(text) == 3 + 5 + 1
        assert text == target + "....." + "="


def test_reversed_copies_read_backwards():
    for text, target in texts(synthetic.gap_reverse(2, num_symbols=4)):
        assert text == target[::-1] + ".." + "="


def test_the_value_beside_the_key_is_recalled():
    wanted = set()
    for text, target in texts(synthetic.associative_recall(3, num_pairs=4), num=40):
        pairs, question = text.split("...?")
        memory = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(memory) == 4
        assert memory[question] == target
        wanted.add(pairs.index(question) // 2)
    assert wanted == {0, 1, 2, 3}


@pytest.mark.parametrize("repeat_keys", [False, True])
def test_values_follow_in_the_order_they_are_asked_for(repeat_keys):
    task = synthetic.associative_recall(3, num_pairs=5, num_queries=3, repeat_keys=repeat_keys)
    asked = set()
    for text, target in texts(task, num=40):
        pairs, questions = text.split("...?")
        memory = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(set(questions)) == len(questions) == 3
        answers = [key + memory[key] if repeat_keys else memory[key] for key in questions]
        assert target == "".join(answers)
        asked |= {pairs.index(key) // 2 for key in questions}
    assert asked == {0, 1, 2, 3, 4}


def test_looking_back_finds_the_letter_so_many_tokens_before_the_mark():
    marks = set()
    for text, target in texts(synthetic.lookback(4, num_symbols=6), num=40):
        mark = text.index("?")
        assert text[mark - 4] == target
        assert len(text) == 7
        marks.add(mark)
    assert marks == {4, 5, 6}


@pytest.mark.parametrize("hops", [1, 3, 4])
def test_pointers_are_followed_to_the_answer(hops):
    places = set()
    for text, target in texts(synthetic.pointer_hops(hops, num_pointers=5), num=40):
        listed, letter = text.split("?")
        places.add(listed[::2].index(letter))
        pointers = dict(zip(listed[::2], listed[1::2], strict=True))
        assert set(pointers) == set(pointers.values())
        assert len(pointers) == 5
        start = letter
        for _ in range(hops):
            letter = pointers[letter]
        assert letter == target != start
    assert places == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("explain", "num_facts"), [(False, 6), (True, 6), (False, 3)])
def test_a_second_sentence_follows_where_the_first_affirms_it(explain, num_facts):
    answers = {"y": 0, "n": 0}
    task = synthetic.entailment(6, num_facts=num_facts, explain=explain)
    for text, target in texts(task, num=300):
        premise, stated = text.split("?")
        facts = premise.rstrip(".").split(".")
        assert premise == ".".join(facts) + "." * 6
        assert len(set("".join(fact[:2] for fact in facts))) == 2 * num_facts
        assert target[:-1] == stated * explain
        assert {"y": stated + "+", "n": stated + "-"}[target[-1]] in facts
        answers[target[-1]] += 1
    assert 110 < answers["y"] < 190


@pytest.mark.parametrize("gap", [16, 4096])
def test_gaps_are_counted_in_tokens(gap):
    task = synthetic.gap_copy(gap, num_symbols=8)
    (example,) = task.get_dataset(None, "train", shuffle=False).take(1).as_numpy_iterator()
    assert len(example["inputs"]) == 8 + gap + 2
    assert len(example["targets"]) == 9


def test_targets_can_hold_the_symbols_alone():
    task = synthetic.gap_copy(4, num_symbols=8, end_token=False)
    (example,) = task.get_dataset(None, "train", shuffle=False).take(1).as_numpy_iterator()
    assert len(example["inputs"]) == 8 + 4 + 2
    assert task.output_features["targets"].vocabulary.decode(example["targets"].tolist()) == (
        example["targets_pretokenized"].decode()
    )
    assert len(example["targets"]) == 8
    assert [each.without_end for each in formats.of(task)] == [("targets",)]


@some_tasks
def test_the_seed_decides(make):
    assert texts(make()) == texts(make()) != texts(make(seed=1))


@some_tasks
def test_splits_differ(make):
    task = make(num_train=30, num_eval=10)
    found = {split: texts(task, split, num=-1) for split in task.splits}
    assert [len(found[split]) for split in ("train", "validation", "test")] == [30, 10, 10]
    assert found["validation"] != found["test"] != found["train"][:10]


@each_task
def test_each_is_registered_under_its_name(make):
    assert seqio.get_mixture_or_task(make.__name__).metric_fns


def test_hosts_make_different_examples_and_together_all():
    task = synthetic.gap_copy(num_train=20)
    shares = [texts(task, num=-1, shard_info=seqio.ShardInfo(i, 2)) for i in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(texts(task, num=-1))


@pytest.mark.slow
def test_batches_go_on_at_a_saved_position():
    task = synthetic.associative_recall(num_train=50)
    config = data.DataConfig(mixture=task, batch_size=4, encoder_length=32, decoder_length=4)
    batches = config.build(process_index=0, process_count=1)
    next(batches)
    position = batches.get_state()
    expected = next(batches)["encoder_input_tokens"]
    again = config.build(process_index=0, process_count=1)
    again.set_state(position)
    np.testing.assert_array_equal(next(again)["encoder_input_tokens"], expected)


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "settings", "message"),
        [
            (synthetic.gap_copy, {"gap": -1}, "gap=-1 must be at least 0"),
            (synthetic.gap_reverse, {"num_symbols": 0}, "num_symbols=0 must be at least 1"),
            (synthetic.associative_recall, {"num_pairs": 27}, "num_pairs=27 .* at most 26"),
            (synthetic.associative_recall, {"num_queries": 5}, "num_queries=5 .* at most 4"),
            (synthetic.lookback, {"gap": 8, "num_symbols": 7}, "num_symbols=7 must be at least 8"),
            (synthetic.lookback, {"gap": 0}, "gap=0 must be at least 1"),
            (synthetic.pointer_hops, {"hops": 8}, "hops=8 must be at least 1 and at most 7"),
            (synthetic.pointer_hops, {"num_pointers": 27}, "num_pointers=27 .* at most 26"),
            (synthetic.entailment, {"num_facts": 0}, "num_facts=0 must be at least 1"),
            (synthetic.entailment, {"num_facts": 14}, "num_facts=14 .* at most 13"),
            (synthetic.listops, {"max_arguments": 1}, "max_arguments=1 must be at least 2"),
            (synthetic.listops, {"max_depth": 0}, "max_depth=0 must be at least 1"),
            (synthetic.listops, {"max_length": 3}, "max_length=3 must be at least 4"),
            (synthetic.listops, {"num_train": 0}, "num_train=0 must be at least 1"),
        ],
    )
    def test_values_out_of_range_are_named(self, make, settings, message):
        with pytest.raises(errors.UserError, match=message):
            make(**settings)

    @each_task
    def test_a_negative_seed_is_named(self, make):
        with pytest.raises(errors.UserError, match="seed=-1 must be at least 0"):
            make(seed=-1)

    def test_lengths_that_no_tree_has_are_named(self):
        with pytest.raises(errors.UserError, match="none has min_length=50 to max_length=60"):
            synthetic.listops(max_depth=1, min_length=50, max_length=60)

    def test_lengths_that_would_cut_the_answer_off_are_refused(self):
        task = synthetic.gap_copy(100)
        config = data.DataConfig(mixture=task, batch_size=1, encoder_length=64, decoder_length=16)
        with pytest.raises(errors.UserError, match=r"inputs of 110 tokens do not fit .* 64"):
            config.build(process_index=0, process_count=1)
