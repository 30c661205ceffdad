"""Synthetic tasks that test how far and how deep a model sees: ListOps, gaps, pointers.

An example is determined by the seed, its split and its number, so all hosts and runs have the same
ones, and nothing is stored. Importing this registers each task with its defaults.

The gap tasks use byte tokens, one per symbol, so gaps are counted in tokens. An encoder-decoder can
bridge the gap of `gap_copy`, `gap_reverse` and `associative_recall` by encoder-decoder attention;
that of `lookback` only by the mixing in the encoder. `pointer_hops` tests depth: it follows several
pointers for a single answer. `entailment` relates two sentences, as natural language inference
does.
"""

import dataclasses
import functools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.errors import checks
from convt5.runtime import descriptions

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


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class GeneratedTask:
    """Settings of all generated tasks.

    Attributes:
        num_train: number of examples in "train"; they repeat in each epoch.
        num_eval: number of examples in "validation" and in "test".
        seed: random seed of the examples.
        name: name of the task; use the same one if you register it.
    """

    num_train: int = NUM_TRAIN
    num_eval: int = NUM_EVAL
    seed: int = 0
    name: str

    def source(self, *, fields: Sequence[str] = Pair._fields) -> GeneratedSource:
        """Returns the examples, with their texts under the names of `fields`."""
        sizes = {"num_train": self.num_train, "num_eval": self.num_eval}
        return GeneratedSource(self.example, **sizes, seed=self.seed, fields=fields)

    def example(self, random: np.random.Generator) -> Pair:
        """Generates an example from random numbers."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ListOps(GeneratedTask):
    """ListOps, nested operations on lists of digits: `[MAX 1 5 [MIN 9 2 5 ] ]` is 5.

    Nangia and Bowman 2018 (arXiv 1804.06028), with their distribution of trees: each argument is an
    operation with probability 1/4. Long Range Arena uses max_depth=10, max_arguments=10,
    min_length=500 and max_length=2000.

    Attributes:
        vocabulary: None means bytes.
        max_depth: maximum nesting of operations, at least 1.
        max_arguments: maximum arguments of an operation, at least 2.
        min_length: minimum number of operators, digits and closing brackets.
        max_length: maximum number of them.
        rank: see `classification.classification_task`.

    Raises:
        UserError: `build` finds a value out of range, or trees of this kind hardly ever have these
            lengths.
    """

    vocabulary: seqio.Vocabulary | None = None
    _: dataclasses.KW_ONLY
    max_depth: int = 5
    max_arguments: int = 5
    min_length: int = 4
    max_length: int = 200
    rank: bool = False
    name: str = "listops"

    def build(self) -> seqio.Task:
        """Returns the task, whose labels are the digits."""
        faults = _seed_faults(self.seed)
        if self.max_depth < 1:
            faults.append(f"max_depth={self.max_depth} must be at least 1.")
        if self.max_arguments < 2:
            faults.append(f"max_arguments={self.max_arguments} must be at least 2.")
        if not 4 <= self.max_length >= self.min_length:
            faults.append(
                f"max_length={self.max_length} must be at least 4 and min_length={self.min_length}."
            )
        errors.raise_all(faults, where=self.name)
        self.example(np.random.default_rng(self.seed))
        return classification_task(
            self.name,
            self.source(fields=("text", "label")),
            self.vocabulary or vocabularies.characters(),
            prompt="{text}",
            labels=list(string.digits),
            rank=self.rank,
        )

    def example(self, random: np.random.Generator) -> Pair:
        for _ in range(10_000):
            words: list[str] = []
            value = self._operation(random, words, self.max_depth)
            if value is not None and self.min_length <= len(words):
                return Pair(" ".join(words), str(value))
        raise errors.UserError(
            f"listops: of 10,000 trees with max_depth={self.max_depth} and "
            f"max_arguments={self.max_arguments} none has min_length={self.min_length} to "
            f"max_length={self.max_length} words; raise max_depth or max_arguments, or widen the "
            "lengths."
        )

    def _operation(self, random: np.random.Generator, words: list[str], depth: int) -> int | None:
        """Appends the words of an operation and returns its value, or None if it gets too long."""
        operator = list(_OPERATORS)[random.integers(len(_OPERATORS))]
        words.append(operator)
        values = []
        for _ in range(random.integers(2, self.max_arguments + 1)):
            if depth > 1 and random.random() < 0.25:
                value = self._operation(random, words, depth - 1)
            else:
                value = int(random.integers(10))
                words.append(str(value))
            if value is None or len(words) >= self.max_length:
                return None
            values.append(value)
        words.append("]")
        return _OPERATORS[operator](values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SymbolTask(GeneratedTask):
    """Settings of the tasks whose examples are byte tokens, one per symbol.

    Attributes:
        end_token: whether targets end with the end token. Without it, accuracy counts only symbols,
            but the model does not learn to stop.

    Raises:
        UserError: `build` finds a value out of range.
    """

    end_token: bool = True

    def ranges(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the minimum, and the maximum if there is one, of settings."""
        raise NotImplementedError

    def build(self) -> seqio.Task:
        """Returns the task; all of its examples have equal lengths."""
        faults = []
        for setting, (least, *greatest) in self.ranges().items():
            value = getattr(self, setting)
            if value < least or (greatest and value > greatest[0]):
                limit = f" and at most {greatest[0]}" if greatest else ""
                faults.append(f"{setting}={value} must be at least {least}{limit}.")
        errors.raise_all(faults, where=self.name)
        source = self.source()
        texts = source.example("train", 0)
        ends = {"inputs": True, "targets": self.end_token}
        needed = {field: len(text) + ends[field] for field, text in texts._asdict().items()}
        vocabulary = vocabularies.characters()
        return registration.task(
            self.name,
            source=source,
            preprocessors=[
                seqio.preprocessors.tokenize,
                seqio.CacheDatasetPlaceholder(),
                functools.partial(check_lengths, task=self.name, needed=needed),
                seqio.preprocessors.append_eos,
            ],
            output_features={
                field: seqio.Feature(vocabulary=vocabulary, add_eos=end)
                for field, end in ends.items()
            },
            metric_fns=[metrics.exact_match],
            shuffle_buffer_size=shuffle_buffer_size(source),
        )


@dataclasses.dataclass(frozen=True)
class GapCopy(SymbolTask):
    """Copies letters: the target of `kdus....=` is `kdus`.

    Attributes:
        gap: number of filler tokens between the symbols and the query mark.
        num_symbols: number of letters to copy.
    """

    gap: int = 16
    _: dataclasses.KW_ONLY
    num_symbols: int = 8
    name: str = "gap_copy"

    def ranges(self) -> Mapping[str, tuple[int, ...]]:
        return {"gap": (0,), "num_symbols": (1,)}

    def example(self, random: np.random.Generator) -> Pair:
        symbols = _letters(random, self.num_symbols)
        return Pair(symbols + FILLER * self.gap + COPY_MARK, symbols)


@dataclasses.dataclass(frozen=True)
class GapReverse(GapCopy):
    """Reverses letters: the target of `kdus....=` is `sudk`."""

    _: dataclasses.KW_ONLY
    name: str = "gap_reverse"

    def example(self, random: np.random.Generator) -> Pair:
        inputs, targets = super().example(random)
        return Pair(inputs, targets[::-1])


@dataclasses.dataclass(frozen=True)
class AssociativeRecall(SymbolTask):
    """Recalls the value of a key: the target of `a3k7b1....?k` is `7`.

    Attributes:
        gap: number of filler tokens between the last pair and the query mark.
        num_pairs: pairs of a distinct letter and a digit; at most 26.
        num_queries: number of distinct keys in the query, at most `num_pairs`; their values follow
            in the same order.
        repeat_keys: whether the target names each key before its value: `a3k7b1....?kb` gives
            `k7b1`. The decoder then attends once to find a value; otherwise twice, to the key and
            to the value, which small models without Canon layers learn late or never.
    """

    gap: int = 16
    _: dataclasses.KW_ONLY
    num_pairs: int = 4
    num_queries: int = 1
    repeat_keys: bool = False
    name: str = "associative_recall"

    def ranges(self) -> Mapping[str, tuple[int, ...]]:
        pairs, queries = (1, len(string.ascii_lowercase)), (1, self.num_pairs)
        return {"gap": (0,), "num_pairs": pairs, "num_queries": queries}

    def example(self, random: np.random.Generator) -> Pair:
        keys = random.permutation(list(string.ascii_lowercase))[: self.num_pairs]
        values = random.choice(list(string.digits), self.num_pairs)
        # One scalar draw for a single query, which keeps the examples of earlier versions.
        queried = (
            [random.integers(self.num_pairs)]
            if self.num_queries == 1
            else random.permutation(self.num_pairs)[: self.num_queries]
        )
        pairs = [key + value for key, value in zip(keys, values, strict=True)]
        queries = "".join(keys[i] for i in queried)
        answer = "".join(pairs[i] if self.repeat_keys else values[i] for i in queried)
        return Pair("".join(pairs) + FILLER * self.gap + QUERY_MARK + queries, answer)


@dataclasses.dataclass(frozen=True)
class Lookback(SymbolTask):
    """Finds the token `gap` before a mark: with 3, `kdusx?vq` gives `u`.

    The mark is at a random position, so neither content nor position tells the decoder where to
    look: the encoder must see that far.

    Attributes:
        gap: number of tokens from the wanted letter to the mark, at least 1.
        num_symbols: number of letters without the mark, at least `gap`; None means twice `gap`.
    """

    gap: int = 16
    _: dataclasses.KW_ONLY
    num_symbols: int | None = None
    name: str = "lookback"

    def ranges(self) -> Mapping[str, tuple[int, ...]]:
        letters = {} if self.num_symbols is None else {"num_symbols": (max(self.gap, 1),)}
        return {"gap": (1,), **letters}

    def example(self, random: np.random.Generator) -> Pair:
        num_symbols = 2 * self.gap if self.num_symbols is None else self.num_symbols
        symbols = _letters(random, num_symbols)
        mark = random.integers(self.gap, num_symbols + 1)
        return Pair(symbols[:mark] + QUERY_MARK + symbols[mark:], symbols[mark - self.gap])


@dataclasses.dataclass(frozen=True)
class PointerHops(SymbolTask):
    """Follows pointers: with 2 hops, `bdaccbda?a` gives `b`.

    Each pair points from its first letter to its second. The pointers form one cycle, in random
    order. The target is the letter after `hops` pointers. Intermediate steps are not written, so
    each hop takes depth (like Depo of arXiv 2512.17351, which repeats the question).

    Attributes:
        hops: number of pointers to follow, at least 1 and less than `num_pointers`, so that the
            target is never the queried letter.
        num_pointers: number of letters, at least 2 and at most 26.
    """

    hops: int = 2
    _: dataclasses.KW_ONLY
    num_pointers: int = 8
    name: str = "pointer_hops"

    def ranges(self) -> Mapping[str, tuple[int, ...]]:
        pointers = (2, len(string.ascii_lowercase))
        return {"num_pointers": pointers, "hops": (1, self.num_pointers - 1)}

    def example(self, random: np.random.Generator) -> Pair:
        cycle = random.permutation(list(string.ascii_lowercase))[: self.num_pointers]
        pointers = [a + b for a, b in zip(cycle, np.roll(cycle, -1), strict=True)]
        start = random.integers(self.num_pointers)
        listed = "".join(random.permutation(pointers))
        target = cycle[(start + self.hops) % self.num_pointers]
        return Pair(listed + QUERY_MARK + cycle[start], target)


@dataclasses.dataclass(frozen=True)
class Entailment(SymbolTask):
    """Relates two sentences: does the second follow from the first?

    The first sentence affirms facts about pairs of names or denies them, the second affirms one:
    after `ab+.cd-.ef-.gh-`, `?ab` follows (`y`) and `?cd` does not (`n`). Signs are independent.
    Without the relation a model can only count signs: of four facts, the more frequent sign is
    right in 11 of 16 examples.

    Attributes:
        gap: number of filler tokens between the sentences.
        num_facts: facts of the first sentence, at least 1 and at most 13.
        explain: whether the target repeats the second sentence before the answer: `cdn`. Like
            `repeat_keys` of `AssociativeRecall`, this spares the decoder one of two steps.
    """

    gap: int = 0
    _: dataclasses.KW_ONLY
    num_facts: int = 4
    explain: bool = False
    name: str = "entailment"

    def ranges(self) -> Mapping[str, tuple[int, ...]]:
        return {"gap": (0,), "num_facts": (1, len(string.ascii_lowercase) // 2)}

    def example(self, random: np.random.Generator) -> Pair:
        names = random.permutation(list(string.ascii_lowercase))[: 2 * self.num_facts]
        pairs = [a + b for a, b in zip(names[::2], names[1::2], strict=True)]
        signs = random.choice(["+", "-"], self.num_facts)
        facts = FILLER.join(p + s for p, s in zip(pairs, signs, strict=True))
        stated = random.integers(self.num_facts)
        answer = "y" if signs[stated] == "+" else "n"
        premise = facts + FILLER * self.gap
        return Pair(premise + QUERY_MARK + pairs[stated], pairs[stated] * self.explain + answer)


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


def _seed_faults(seed: int) -> list[str]:
    return [f"seed={seed} must be at least 0."] if seed < 0 else []


def _letters(random: np.random.Generator, num: int) -> str:
    return "".join(random.choice(list(string.ascii_lowercase), num))


listops = descriptions.function("listops", ListOps, ListOps.build)
gap_copy = descriptions.function("gap_copy", GapCopy, GapCopy.build)
gap_reverse = descriptions.function("gap_reverse", GapReverse, GapReverse.build)
associative_recall = descriptions.function(
    "associative_recall", AssociativeRecall, AssociativeRecall.build
)
lookback = descriptions.function("lookback", Lookback, Lookback.build)
pointer_hops = descriptions.function("pointer_hops", PointerHops, PointerHops.build)
entailment = descriptions.function("entailment", Entailment, Entailment.build)

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
