"""Questions about plain text, for pre-training on question answering without labelled data.

Noisy clozes, after Lewis et al. 2019 (arXiv 1906.04980): the answer is a name, a number, a year or
a phrase of a passage. The question is words of its sentence, with a question word in its place.
Answering takes what extractive question answering takes: to find the sentence that shares the words
of the question, and to copy from it. The question words are English.
"""

import collections
import functools
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors

from . import span_corruption, squad

Kind = Literal["name", "place", "number", "year", "phrase"]

_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"\u201d\u2019)]))(?<!\b[A-Z]\.)(?<!\b[DM]r\.)(?<!\bMrs\.)(?<!\bSt\.)"
    r"\s+(?=[\"\u201c\u2018(]?[A-Z0-9])|\n"
)
_BARE = re.compile(r"\w(?:.*\w)?")
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_UNQUOTED = re.compile(r"[\"\u201c\u201d()]")
_SENTENCE_WORDS = range(6, 61)
_NAME_WORDS = 6
_PHRASE_WORDS = 4
_KEPT_WORDS = (4, 12)
_WIDEST_GAP = 4
_FEWEST_TELLING = 2
_PLACE_WORDS = {"at", "from", "in", "into", "near", "to"}
_LINKS = {"and", "of", "the"}
_WORDS = """
a about after all also am an and any are as at be because been before being both but by can could
did do does during each every for from had has have he her here him his how i if in into is it its
just may me might more most must my no nor not of on one only or other our out over own s same shall
she should so some such t than that the their them then there these they this those through to under
until up us very was we were what when where which while who whom whose why will with would you your
"""
_FUNCTION_WORDS = frozenset(_WORDS.split())
# Kinds of one group could be taken for each other.
_GROUPS: dict[Kind, str] = {
    "name": "name",
    "place": "name",
    "number": "number",
    "year": "number",
    "phrase": "phrase",
}
_QUESTION_WORDS: dict[Kind, tuple[str, ...]] = {
    "name": ("Who", "Who", "Who", "What", "Which"),
    "place": ("Where", "Where", "What", "Which"),
    "number": ("How many", "How many", "How much", "What"),
    "year": ("When", "When", "In what year", "What year"),
    "phrase": ("What", "What", "What", "How", "Why", "Which"),
}


class Question(NamedTuple):
    """A question about a passage, and its answer, which stands in the passage."""

    context: str
    question: str
    answer: str


class Span(NamedTuple):
    """The words [start, end) of a sentence as an answer."""

    start: int
    end: int
    kind: Kind


def cloze_questions(
    corpus: seqio.Task,
    *,
    min_words: int = 20,
    max_words: int = 180,
    questions: int = 3,
    noise: float = 0.8,
    contrast: bool = False,
    mark_shared: bool = False,
    name: str = "cloze_questions",
) -> seqio.Task:
    """Returns a task of questions about the documents of another, in the form of `squad.squad`.

    Each epoch asks other questions. `data.DataConfig.pack` puts short passages into one row.

    Args:
        corpus: a task that provides documents and vocabulary, such as
            `pretraining.text_span_corruption`.
        min_words, max_words: length of a passage before its last sentence. Short ones, from which
            copying is learned first, are as frequent as long ones: the logarithm is uniform.
        questions: most questions about a passage.
        noise: largest fraction of the function words of a sentence left out of a question, in
            [0, 1], of other words half as many; each question draws its own from 0 to this, and
            takes 4 to 12 of the words that are left.
        contrast: whether to ask only what the words of the question decide: for the only name, or
            number, of its sentence, if other sentences of the passage have one too, with words
            that stand in no other. So they teach to find the sentence before all else.
        mark_shared: as in `squad.squad`; use the same there.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: a value is out of range.
    """
    span_corruption.check_corpus(name, corpus)
    faults = []
    if not 1 <= min_words <= max_words:
        faults.append(
            f"min_words={min_words} must be at least 1 and at most max_words={max_words}."
        )
    if questions < 1:
        faults.append(f"questions={questions} must be at least 1.")
    if not 0 <= noise <= 1:
        faults.append(f"noise={noise} must be in [0, 1].")
    errors.raise_all(faults, where=name)
    ask = functools.partial(
        ask_about,
        lengths=(min_words, max_words),
        questions=questions,
        noise=noise,
        contrast=contrast,
    )
    return squad.question_answering(
        name,
        corpus.source,
        [span_corruption.text_as_targets, functools.partial(_rows, ask=ask)],
        corpus.output_features,
        mark_shared=mark_shared,
    )


def _rows(dataset: tf.data.Dataset, *, ask: Any) -> tf.data.Dataset:
    """Turns documents, text under "targets", into rows of `squad.squad`."""

    def of_document(text: bytes, seed: np.ndarray) -> np.ndarray:
        rng = random.Random(seed.tobytes())
        asked = ask(text.decode("utf-8", "replace"), rng)
        return np.array(asked, object).reshape(-1, len(Question._fields))

    def ask_about_document(row: Mapping[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        asked = tf.numpy_function(of_document, [row["targets"], seed], tf.string, stateful=False)
        asked = tf.ensure_shape(asked, [None, len(Question._fields)])
        return {"context": asked[:, 0], "question": asked[:, 1], "answers": asked[:, 2:]}

    ask_all: Any = seqio.map_over_dataset(ask_about_document, num_seeds=1)
    return ask_all(dataset).unbatch()


def ask_about(
    text: str,
    rng: random.Random,
    *,
    lengths: tuple[int, int],
    questions: int,
    noise: float,
    contrast: bool = False,
) -> list[Question]:
    """Returns the questions about a document; see `cloze_questions`."""
    asked = []
    for sentences in _passages(text, rng, lengths):
        context = " ".join(itertools.chain.from_iterable(sentences))
        options = [(i, span) for i, words in enumerate(sentences) for span in answers(words, rng)]
        if contrast:
            options = _contrasting(options)
        for place, span in rng.sample(options, min(questions, len(options))):
            words = sentences[place]
            answer = _bare(" ".join(words[span.start : span.end]))
            others = sentences[:place] + sentences[place + 1 :] if contrast else []
            elsewhere = {_bare(word).lower() for word in itertools.chain.from_iterable(others)}
            question = _question(words, span, rng, noise, elsewhere)
            if question:
                asked.append(Question(context, question, answer))
    return asked


def _passages(text: str, rng: random.Random, lengths: tuple[int, int]) -> Iterator[list[list[str]]]:
    """Yields consecutive sentences, lists of words; fragments and very long ones are left out."""
    shortest, longest = map(math.log, lengths)
    sentences = (sentence.split() for sentence in _SENTENCE_END.split(text))
    passage: list[list[str]] = []
    size = math.exp(rng.uniform(shortest, longest))
    for words in sentences:
        if len(words) not in _SENTENCE_WORDS:
            continue
        passage.append(words)
        if sum(map(len, passage)) >= size:
            yield passage
            passage, size = [], math.exp(rng.uniform(shortest, longest))
    if sum(map(len, passage)) >= lengths[0]:
        yield passage


def answers(words: Sequence[str], rng: random.Random) -> list[Span]:
    """Returns the names, numbers and years of a sentence, and a phrase at random."""
    found: list[Span] = []
    bare = [_bare(word) for word in words]
    place = 0
    while place < len(words):
        word, start = bare[place], place
        place += 1
        if any(c.isdigit() for c in word):
            found.append(Span(start, place, "year" if _YEAR.fullmatch(word) else "number"))
        elif start and _is_name(word):
            place = _end_of_name(words[: start + _NAME_WORDS], bare, start)
            follows = bare[start - 1].lower() in _PLACE_WORDS
            found.append(Span(start, place, "place" if follows else "name"))
    start = rng.randrange(len(words))
    return [*found, *_phrase(words, bare, start, start + rng.randint(1, _PHRASE_WORDS))]


def _contrasting(options: Sequence[tuple[int, Span]]) -> list[tuple[int, Span]]:
    """Returns the answers alone of their group in their sentence, but not in their passage."""
    each = collections.Counter((place, _GROUPS[span.kind]) for place, span in options)
    alone = [(place, span) for place, span in options if each[place, _GROUPS[span.kind]] == 1]
    alike = collections.Counter(_GROUPS[span.kind] for _, span in alone)
    return [
        (place, span)
        for place, span in alone
        if span.kind != "phrase" and alike[_GROUPS[span.kind]] > 1
    ]


def _is_name(word: str) -> bool:
    return len(word) > 1 and word[0].isupper() and not _is_function_word(word)


def _end_of_name(words: Sequence[str], bare: Sequence[str], start: int) -> int:
    """Returns the end of a name such as "Bank of England"; punctuation ends it."""
    end = start + 1
    for place in range(start + 1, len(words)):
        if not _is_joined(words, bare, place):
            break
        if bare[place][0].isupper():
            end = place + 1
        elif bare[place] not in _LINKS:
            break
    return end


def _phrase(words: Sequence[str], bare: Sequence[str], start: int, end: int) -> Iterable[Span]:
    """Returns [start, end) less function words at its ends, unless punctuation is inside."""
    end = min(end, len(words))
    while start < end and _is_function_word(bare[start]):
        start += 1
    while start < end and _is_function_word(bare[end - 1]):
        end -= 1
    is_whole = all(_is_joined(words, bare, place) for place in range(start + 1, end))
    return [Span(start, end, "phrase")] if start < end and bare[start] and is_whole else []


def _is_joined(words: Sequence[str], bare: Sequence[str], place: int) -> bool:
    """Returns whether no punctuation is between a word and the one before it."""
    before = words[place - 1].endswith(bare[place - 1])
    return before and bool(bare[place]) and words[place].startswith(bare[place])


def _question(
    words: Sequence[str], span: Span, rng: random.Random, noise: float, elsewhere: Set[str]
) -> str | None:
    """Returns words of a sentence with a question word for the answer; None if too few tell it.

    Words beside the answer are left out at random, for people rarely ask with these: then only the
    rest of the sentence tells where the answer is. So are words that stand elsewhere.
    """
    rate, gap = rng.uniform(0, noise), rng.randint(0, _WIDEST_GAP)
    beside = range(span.start - gap, span.end + gap)
    tells = [not _is_function_word(_bare(word)) for word in words]
    kept = [
        place
        for place in range(len(words))
        if place not in beside
        and _bare(words[place]).lower() not in elsewhere
        and rng.random() >= (rate / 2 if tells[place] else rate)
    ]
    size = rng.randint(*_KEPT_WORDS)
    kept = sorted(rng.sample(kept, min(size, len(kept))))
    if sum(tells[place] for place in kept) < _FEWEST_TELLING:
        return None

    def joined(part: Iterable[int]) -> str:
        return _UNQUOTED.sub("", " ".join(words[place] for place in part)).rstrip(".,;:!?")

    before = joined(place for place in kept if place < span.start)
    after = joined(place for place in kept if place >= span.end)
    asked = rng.choice(_QUESTION_WORDS[span.kind])
    orders = ([asked, before, after], [asked, after, before], [before, asked.lower(), after])
    text = " ".join(part for part in rng.choice(orders) if part)
    return f"{text[0].upper()}{text[1:]}?"


def _is_function_word(bare: str) -> bool:
    return bare.lower() in _FUNCTION_WORDS


def _bare(word: str) -> str:
    """Returns a word without punctuation at its ends."""
    found = _BARE.search(word)  # Takes linear time; r"\W+$" does not.
    return found[0] if found else ""
