"""Synthetic tasks that test how far and how deep a model sees: ListOps, gaps, pointers.

An example is determined by the seed, its split and its number, so all hosts and runs have the same
ones, and nothing is stored. Importing this registers each task with its defaults.

The gap tasks use byte tokens, one per symbol, so gaps are counted in tokens. An encoder-decoder can
bridge the gap of `gap_copy`, `gap_reverse` and `associative_recall` by encoder-decoder attention;
that of `lookback` only by the mixing in the encoder. `pointer_hops` tests depth: it follows several
pointers for a single answer. `entailment` relates two sentences, as natural language inference
does.
"""

import functools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors

from . import formats, metrics, registration, vocabularies
from .classification import classification_task
from .sources import ItemSource, shuffle_buffer_size

NUM_TRAIN = 100_000
NUM_EVAL = 1_000
FILLER, COPY_MARK, QUERY_MARK = ".", "=", "?"

_SPLITS: tuple[str, ...] = ("train", "validation", "test")
_SHUFFLED = 2**16
_GENERATED_TOGETHER = 32
_OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


class Pair(NamedTuple):
    """The texts of one example."""

    inputs: str
    targets: str


Generator = Callable[[np.random.Generator], Pair]


class GeneratedSource(ItemSource):
    """Examples that a function generates from random numbers, under the names of `fields`.

    Args:
        generate: from a random generator to the texts of an example.
        num_train: number of examples in "train"; they repeat in each epoch.
        num_eval: number of examples in "validation" and in "test".
        seed: random seed.
        fields: names of the two texts.
    """

    def __init__(
        self,
        generate: Generator,
        *,
        num_train: int = NUM_TRAIN,
        num_eval: int = NUM_EVAL,
        seed: int = 0,
        fields: Sequence[str] = Pair._fields,
    ):
        sizes = {"num_train": num_train, "num_eval": num_eval}
        errors.raise_all(
            [
                *(f"{name}={size} must be at least 1." for name, size in sizes.items() if size < 1),
                *_seed_faults(seed),
            ],
            where="generated examples",
        )
        self._generate = generate
        self._sizes = dict(zip(_SPLITS, (num_train, num_eval, num_eval), strict=True))
        self._seed = seed
        self._fields = tuple(fields)
        super().__init__(_SPLITS)

    def example(self, split: str, number: int) -> Pair:
        """Returns one example."""
        return self._generate(np.random.default_rng([self._seed, _SPLITS.index(split), number]))

    def items(self, split: str) -> tuple[tf.data.Dataset, int]:
        size = self._sizes[split]
        return tf.data.Dataset.range(size), min(size, _SHUFFLED)

    def examples(self, split: str, items: tf.data.Dataset) -> tf.data.Dataset:
        def generated(numbers: np.ndarray) -> list[np.ndarray]:
            pairs = [self.example(split, int(number)) for number in numbers]
            fields = zip(*pairs, strict=True)
            return [np.array([text.encode() for text in texts], object) for texts in fields]

        def made(numbers: tf.Tensor) -> dict[str, tf.Tensor]:
            kinds = [tf.string] * len(self._fields)
            texts = tf.numpy_function(generated, [numbers], kinds, stateful=False)
            return {f: tf.ensure_shape(t, [None]) for f, t in zip(self._fields, texts, strict=True)}

        # A call of Python from TensorFlow takes longer than generating an example.
        return items.batch(_GENERATED_TOGETHER).map(made).unbatch()


def listops(
    vocabulary: seqio.Vocabulary | None = None,
    *,
    max_depth: int = 5,
    max_arguments: int = 5,
    min_length: int = 4,
    max_length: int = 200,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    rank: bool = False,
    name: str = "listops",
) -> seqio.Task:
    """Returns ListOps, nested operations on lists of digits: `[MAX 1 5 [MIN 9 2 5 ] ]` is 5.

    Nangia and Bowman 2018 (arXiv 1804.06028), with their distribution of trees: each argument is an
    operation with probability 1/4. Long Range Arena uses max_depth=10, max_arguments=10,
    min_length=500 and max_length=2000.

    Args:
        vocabulary: None means bytes.
        max_depth: maximum nesting of operations, at least 1.
        max_arguments: maximum arguments of an operation, at least 2.
        min_length: minimum number of operators, digits and closing brackets.
        max_length: maximum number of them.
        num_train: number of examples in "train".
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        rank: see `classification.classification_task`.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value is out of range, or trees of this kind hardly ever have these lengths.
    """
    faults = _seed_faults(seed)
    if max_depth < 1:
        faults.append(f"max_depth={max_depth} must be at least 1.")
    if max_arguments < 2:
        faults.append(f"max_arguments={max_arguments} must be at least 2.")
    if not 4 <= max_length >= min_length:
        faults.append(f"max_length={max_length} must be at least 4 and min_length={min_length}.")
    errors.raise_all(faults, where=name)
    generate = functools.partial(
        _list_operation,
        max_depth=max_depth,
        max_arguments=max_arguments,
        lengths=(min_length, max_length),
    )
    generate(np.random.default_rng(seed))
    return classification_task(
        name,
        GeneratedSource(
            generate, num_train=num_train, num_eval=num_eval, seed=seed, fields=("text", "label")
        ),
        vocabulary or vocabularies.characters(),
        prompt="{text}",
        labels=list(string.digits),
        rank=rank,
    )


def gap_copy(
    gap: int = 16,
    *,
    num_symbols: int = 8,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    end_token: bool = True,
    name: str = "gap_copy",
) -> seqio.Task:
    """Returns a copying task: the target of `kdus....=` is `kdus`.

    Args:
        gap: number of filler tokens between the symbols and the query mark.
        num_symbols: number of letters to copy.
        num_train: number of examples in "train".
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        end_token: whether targets end with the end token. Without it, accuracy counts only symbols,
            but the model does not learn to stop.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value out of range.
    """
    generate = functools.partial(_copy, gap=gap, num_symbols=num_symbols, step=1)
    source = GeneratedSource(generate, num_train=num_train, num_eval=num_eval, seed=seed)
    return _gap_task(
        name, source, {"gap": (gap, 0), "num_symbols": (num_symbols, 1)}, end_token=end_token
    )


def gap_reverse(
    gap: int = 16,
    *,
    num_symbols: int = 8,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    end_token: bool = True,
    name: str = "gap_reverse",
) -> seqio.Task:
    """Returns a reversal task: the target of `kdus....=` is `sudk`. Arguments as in `gap_copy`."""
    generate = functools.partial(_copy, gap=gap, num_symbols=num_symbols, step=-1)
    source = GeneratedSource(generate, num_train=num_train, num_eval=num_eval, seed=seed)
    return _gap_task(
        name, source, {"gap": (gap, 0), "num_symbols": (num_symbols, 1)}, end_token=end_token
    )


def associative_recall(
    gap: int = 16,
    *,
    num_pairs: int = 4,
    num_queries: int = 1,
    repeat_keys: bool = False,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    end_token: bool = True,
    name: str = "associative_recall",
) -> seqio.Task:
    """Returns a task that recalls the value of a key: the target of `a3k7b1....?k` is `7`.

    Args:
        gap: number of filler tokens between the last pair and the query mark.
        num_pairs: pairs of a distinct letter and a digit; at most 26.
        num_queries: number of distinct keys in the query, at most `num_pairs`; their values follow
            in the same order.
        repeat_keys: whether the target names each key before its value: `a3k7b1....?kb` gives
            `k7b1`. The decoder then attends once to find a value; otherwise twice, to the key and
            to the value, which small models take very long to learn.
        num_train: number of examples in "train".
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        end_token: whether targets end with the end token. Without it, accuracy counts only symbols,
            but the model does not learn to stop.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value out of range.
    """
    ranges = {
        "gap": (gap, 0),
        "num_pairs": (num_pairs, 1, len(string.ascii_lowercase)),
        "num_queries": (num_queries, 1, num_pairs),
    }
    generate = functools.partial(
        _recall, gap=gap, num_pairs=num_pairs, num_queries=num_queries, repeat_keys=repeat_keys
    )
    source = GeneratedSource(generate, num_train=num_train, num_eval=num_eval, seed=seed)
    return _gap_task(name, source, ranges, end_token=end_token)


def lookback(
    gap: int = 16,
    *,
    num_symbols: int | None = None,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    end_token: bool = True,
    name: str = "lookback",
) -> seqio.Task:
    """Returns a task that finds the token `gap` before a mark: with 3, `kdusx?vq` gives `u`.

    The mark is at a random position, so neither content nor position tells the decoder where to
    look: the encoder must see that far.

    Args:
        gap: number of tokens from the wanted letter to the mark, at least 1.
        num_symbols: number of letters without the mark, at least `gap`; None means twice `gap`.
        num_train: number of examples in "train".
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        end_token: whether targets end with the end token. Without it, accuracy counts only symbols,
            but the model does not learn to stop.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value out of range.
    """
    num_symbols = 2 * gap if num_symbols is None else num_symbols
    generate = functools.partial(_look_back, gap=gap, num_symbols=num_symbols)
    source = GeneratedSource(generate, num_train=num_train, num_eval=num_eval, seed=seed)
    return _gap_task(
        name,
        source,
        {"gap": (gap, 1), "num_symbols": (num_symbols, max(gap, 1))},
        end_token=end_token,
    )


def pointer_hops(
    hops: int = 2,
    *,
    num_pointers: int = 8,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    end_token: bool = True,
    name: str = "pointer_hops",
) -> seqio.Task:
    """Returns a task that follows pointers: with 2 hops, `bdaccbda?a` gives `b`.

    Each pair points from its first letter to its second. The pointers form one cycle, in random
    order. The target is the letter after `hops` pointers. Intermediate steps are not written, so
    each hop takes depth (like Depo of arXiv 2512.17351, which repeats the question).

    Args:
        hops: number of pointers to follow, at least 1 and less than `num_pointers`, so that the
            target is never the queried letter.
        num_pointers: number of letters, at least 2 and at most 26.
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        end_token: whether targets end with the end token. Without it, accuracy counts only symbols,
            but the model does not learn to stop.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value out of range.
    """
    ranges = {
        "num_pointers": (num_pointers, 2, len(string.ascii_lowercase)),
        "hops": (hops, 1, num_pointers - 1),
    }
    generate = functools.partial(_follow, hops=hops, num_pointers=num_pointers)
    source = GeneratedSource(generate, num_train=num_train, num_eval=num_eval, seed=seed)
    return _gap_task(name, source, ranges, end_token=end_token)


def entailment(
    gap: int = 0,
    *,
    num_facts: int = 4,
    explain: bool = False,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    seed: int = 0,
    end_token: bool = True,
    name: str = "entailment",
) -> seqio.Task:
    """Returns a task of two sentences: does the second follow from the first?

    The first sentence affirms facts about pairs of names or denies them, the second affirms one:
    after `ab+.cd-.ef-.gh-`, `?ab` follows (`y`) and `?cd` does not (`n`). Signs are independent.
    Without the relation a model can only count signs: of four facts, the more frequent sign is
    right in 11 of 16 examples.

    Args:
        gap: number of filler tokens between the sentences.
        num_facts: facts of the first sentence, at least 1 and at most 13.
        explain: whether the target repeats the second sentence before the answer: `cdn`. Like
            `repeat_keys` of `associative_recall`, this spares the decoder one of two steps.
        num_train: number of examples in "train".
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        end_token: whether targets end with the end token. Without it, accuracy counts only answers,
            but the model does not learn to stop.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value out of range.
    """
    ranges = {"gap": (gap, 0), "num_facts": (num_facts, 1, len(string.ascii_lowercase) // 2)}
    generate = functools.partial(_entail, gap=gap, num_facts=num_facts, explain=explain)
    source = GeneratedSource(generate, num_train=num_train, num_eval=num_eval, seed=seed)
    return _gap_task(name, source, ranges, end_token=end_token)


@formats.keeps_inputs
def check_lengths(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    *,
    task: str,
    needed: Mapping[str, int],
) -> tf.data.Dataset:
    """Returns the dataset unchanged.

    Raises:
        UserError: `sequence_length` is shorter than all examples need, including the end token.
    """
    errors.raise_all(
        [
            f"{feature} of {length} tokens do not fit a length of {sequence_length[feature]}: "
            "the question would be truncated; raise encoder_length and decoder_length."
            for feature, length in needed.items()
            if sequence_length and sequence_length.get(feature, length) < length
        ],
        where=task,
    )
    return dataset


def _gap_task(
    name: str,
    source: GeneratedSource,
    ranges: Mapping[str, tuple[int, ...]],
    *,
    end_token: bool,
) -> seqio.Task:
    """Returns a task with byte tokens; `ranges` has value, minimum and maximum of each setting."""
    faults = []
    for setting, (value, least, *greatest) in ranges.items():
        if value < least or (greatest and value > greatest[0]):
            limit = f" and at most {greatest[0]}" if greatest else ""
            faults.append(f"{setting}={value} must be at least {least}{limit}.")
    errors.raise_all(faults, where=name)
    texts = source.example("train", 0)
    ends = {"inputs": True, "targets": end_token}
    needed = {field: len(text) + ends[field] for field, text in texts._asdict().items()}
    vocabulary = vocabularies.characters()
    return seqio.Task(
        name,
        source=source,
        preprocessors=[
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            functools.partial(check_lengths, task=name, needed=needed),
            seqio.preprocessors.append_eos,
        ],
        output_features={
            field: seqio.Feature(vocabulary=vocabulary, add_eos=end) for field, end in ends.items()
        },
        metric_fns=[metrics.exact_match],
        shuffle_buffer_size=shuffle_buffer_size(source),
    )


def _seed_faults(seed: int) -> list[str]:
    return [f"seed={seed} must be at least 0."] if seed < 0 else []


def _letters(random: np.random.Generator, num: int) -> str:
    return "".join(random.choice(list(string.ascii_lowercase), num))


def _copy(random: np.random.Generator, *, gap: int, num_symbols: int, step: int) -> Pair:
    symbols = _letters(random, num_symbols)
    return Pair(symbols + FILLER * gap + COPY_MARK, symbols[::step])


def _recall(
    random: np.random.Generator, *, gap: int, num_pairs: int, num_queries: int, repeat_keys: bool
) -> Pair:
    keys = random.permutation(list(string.ascii_lowercase))[:num_pairs]
    values = random.choice(list(string.digits), num_pairs)
    # One scalar draw for a single query, which keeps the examples of earlier versions.
    queried = (
        [random.integers(num_pairs)]
        if num_queries == 1
        else random.permutation(num_pairs)[:num_queries]
    )
    pairs = [key + value for key, value in zip(keys, values, strict=True)]
    queries = "".join(keys[i] for i in queried)
    answer = "".join(pairs[i] if repeat_keys else values[i] for i in queried)
    return Pair("".join(pairs) + FILLER * gap + QUERY_MARK + queries, answer)


def _follow(random: np.random.Generator, *, hops: int, num_pointers: int) -> Pair:
    cycle = random.permutation(list(string.ascii_lowercase))[:num_pointers]
    pointers = [a + b for a, b in zip(cycle, np.roll(cycle, -1), strict=True)]
    start = random.integers(num_pointers)
    listed = "".join(random.permutation(pointers))
    return Pair(listed + QUERY_MARK + cycle[start], cycle[(start + hops) % num_pointers])


def _entail(random: np.random.Generator, *, gap: int, num_facts: int, explain: bool) -> Pair:
    names = random.permutation(list(string.ascii_lowercase))[: 2 * num_facts]
    pairs = [a + b for a, b in zip(names[::2], names[1::2], strict=True)]
    signs = random.choice(["+", "-"], num_facts)
    premise = FILLER.join(p + s for p, s in zip(pairs, signs, strict=True)) + FILLER * gap
    stated = random.integers(num_facts)
    answer = "y" if signs[stated] == "+" else "n"
    return Pair(premise + QUERY_MARK + pairs[stated], pairs[stated] * explain + answer)


def _look_back(random: np.random.Generator, *, gap: int, num_symbols: int) -> Pair:
    symbols = _letters(random, num_symbols)
    mark = random.integers(gap, num_symbols + 1)
    return Pair(symbols[:mark] + QUERY_MARK + symbols[mark:], symbols[mark - gap])


def _list_operation(
    random: np.random.Generator, *, max_depth: int, max_arguments: int, lengths: tuple[int, int]
) -> Pair:
    for _ in range(10_000):
        words: list[str] = []
        value = _operation(random, words, max_depth, max_arguments, lengths[1])
        if value is not None and lengths[0] <= len(words):
            return Pair(" ".join(words), str(value))
    raise errors.UserError(
        f"listops: of 10,000 trees with max_depth={max_depth} and max_arguments={max_arguments} "
        f"none has min_length={lengths[0]} to max_length={lengths[1]} words; raise max_depth or "
        "max_arguments, or widen the lengths."
    )


def _operation(
    random: np.random.Generator, words: list[str], depth: int, max_arguments: int, max_length: int
) -> int | None:
    """Appends the words of an operation and returns its value, or None if it gets too long."""
    operator = list(_OPERATORS)[random.integers(len(_OPERATORS))]
    words.append(operator)
    values = []
    for _ in range(random.integers(2, max_arguments + 1)):
        if depth > 1 and random.random() < 0.25:
            value = _operation(random, words, depth - 1, max_arguments, max_length)
        else:
            value = int(random.integers(10))
            words.append(str(value))
        if value is None or len(words) >= max_length:
            return None
        values.append(value)
    words.append("]")
    return _OPERATORS[operator](values)


for _function in (
    listops,
    gap_copy,
    gap_reverse,
    associative_recall,
    lookback,
    pointer_hops,
    entailment,
):
    registration.add(_function())
