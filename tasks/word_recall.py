"""Word recall: the task to complete words of which only the first letters are given.

Each of these words also stands elsewhere in the same text. A model learns this within minutes, long
before it can guess words from their context alone. The quick start trains it on English sentences
that every installation has: the documentation of Python, and the docstrings of its library and of
JAX.
"""

import functools
import importlib.util
import inspect
import pathlib
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.text import sentinels

from . import registration, span_corruption
from .sources import ItemSource

VOCABULARY_FILE = str(pathlib.Path(__file__).with_name("pydoc.model"))
"""SentencePiece model of Python's own text, which docs/tools/pydoc_vocabulary.py trains."""

_PASSAGE_LETTERS = 280
_HOLDOUT_EVERY = 10

_NO_LIBRARY = {
    "dist-packages",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "turtledemo",
}
"""Folders of other packages, and folders that some installations lack."""

_DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.*?)"""', re.DOTALL | re.MULTILINE)
"""A string that begins a line. Parsing the library instead takes seconds of every start."""

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.:]) (?=[A-Z])")
_PROSE = re.compile(r"[A-Z].{40,}[.:]")
_WORD = re.compile(r"▁[A-Za-z]{5,}")
_CONTINUATION = re.compile(r"[^▁\W].*")


def mask_recurring_words(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, Any],
    *,
    least: int = 1,
) -> tf.data.Dataset:
    """Turns documents, token ids under "targets", into pairs of masked text and words.

    Words are pieces of at least five letters. In the input, a sentinel follows the first letters of
    a masked word, as in a crossword; the word stands elsewhere in the same segment too, unmasked.
    The target lists each word after its sentinel, and ends with the last one.

    Args:
        dataset: documents without end tokens; a longer one is split.
        sequence_length: lengths of "inputs" and "targets", including end tokens.
        output_features: the features, which must have the same SentencePiece vocabulary.
        least: segments with fewer masked words are left out.

    Raises:
        UserError: the lengths hold fewer masked words.
    """
    span_corruption.check_lengths_given(sequence_length)
    vocabulary = output_features["targets"].vocabulary
    tables = _word_tables(vocabulary)
    most = min((sequence_length["targets"] - 1) // 2, sequence_length["inputs"] // 4)
    if most < least:
        raise errors.UserError(
            f"encoder_length={sequence_length['inputs']} and decoder_length="
            f"{sequence_length['targets']} hold {most} masked words, and each text has at least "
            f"{least}; set them to at least {4 * least} and {2 * least + 1}."
        )
    marks = tf.constant(sentinels.ids_of(vocabulary)[:most])

    def mask(tokens: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        chosen = choose_words(tokens, tf.constant(most), seed, tables)
        marked = tf.gather(marks, tf.maximum(tf.cumsum(tf.cast(chosen, tf.int32)) - 1, 0))
        clues = tf.gather(tables.clues, tokens)
        text = tf.stack([clues, tf.where(chosen, marked, tokens)], axis=1)
        words = tf.stack([marked, tokens], axis=1)
        return {
            "inputs": text[tf.stack([chosen, tf.ones_like(chosen)], axis=1)],
            "targets": tf.reshape(words[chosen], [-1]),
        }

    mask_all: Any = seqio.map_over_dataset(mask, num_seeds=1)
    segments = span_corruption.split_documents(
        dataset, sequence_length["inputs"] - 1 - most, merge_documents=False
    )
    return mask_all(segments).filter(lambda example: tf.size(example["targets"]) >= 2 * least)


class WordTables(NamedTuple):
    """What is known of each id.

    Attributes:
        clues: id of the first letters of a word of at least five letters; 0 for other ids.
        continuations: whether a piece continues a word.
    """

    clues: np.ndarray
    continuations: np.ndarray


def choose_words(
    tokens: tf.Tensor, count: tf.Tensor, seed: tf.Tensor, tables: WordTables
) -> tf.Tensor:
    """Returns a mask of at most `count` words, each of which also stands at an unmasked position.

    Args:
        tokens: ids of one text.
        count: number of words to choose, fewer if fewer recur.
        seed: two ints.
        tables: which ids are words.
    """
    following = tf.pad(tokens[1:], [[0, 1]])
    whole = (tf.gather(tables.clues, tokens) > 0) & ~tf.gather(tables.continuations, following)
    order = tf.random.stateless_uniform(tf.shape(tokens), seed)
    equal = (tokens[:, None] == tokens[None]) & whole[:, None] & whole[None]
    # The last occurrence in random order stays.
    recurs = tf.reduce_any(equal & (order[None] > order[:, None]), axis=1)
    count = tf.minimum(count, tf.reduce_sum(tf.cast(recurs, tf.int32)))
    chosen = tf.argsort(tf.where(recurs, order, 2.0))[:count]
    return tf.scatter_nd(chosen[:, None], tf.ones_like(chosen, tf.bool), tf.shape(tokens))


def _word_tables(vocabulary: seqio.SentencePieceVocabulary) -> WordTables:
    model = vocabulary.tokenizer
    pieces = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
    ids = {piece: token for token, piece in enumerate(pieces)}
    clues, continuations = np.zeros((2, vocabulary.vocab_size), np.int32)
    for token, piece in enumerate(pieces):
        if _WORD.fullmatch(piece):
            # The mark of a word, then three letters, two or one.
            clues[token] = next((ids[piece[:n]] for n in (4, 3, 2) if piece[:n] in ids), 0)
        continuations[token] = bool(_CONTINUATION.match(piece))
    return WordTables(clues, continuations > 0)


def passages(texts: Iterable[str]) -> list[str]:
    """Returns the English sentences of texts, joined to passages of up to 280 letters.

    Tables, code and indented paragraphs are left out, and paragraphs that an earlier text has.
    """
    found: list[str] = []
    known: set[str] = set()
    for text in texts:
        passage = ""
        for sentence in _sentences(text, known):
            if passage and len(passage) + len(sentence) > _PASSAGE_LETTERS:
                found.append(passage)
                passage = ""
            passage = f"{passage} {sentence}".strip()
        found += [passage] if passage else []
    return found


def _sentences(text: str, known: set[str]) -> Iterator[str]:
    for lines in _PARAGRAPH_END.split(text):
        paragraph = " ".join(lines.split())
        if lines.startswith("    ") or paragraph in known or not _PROSE.fullmatch(paragraph):
            continue
        known.add(paragraph)
        yield from _SENTENCE_END.split(paragraph)


@functools.cache
def pydoc_passages() -> list[str]:
    """Returns passages of Python's documentation and of the docstrings of its standard library."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    modules = sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")])
    return passages(
        [*topics, *_docstrings(path for path in modules if path.parent.name not in _NO_LIBRARY)]
    )


@functools.cache
def jax_passages() -> list[str]:
    """Returns passages of the docstrings of JAX that are not Python's too."""
    spec = importlib.util.find_spec("jax")
    assert spec is not None
    assert spec.origin is not None
    modules = sorted(pathlib.Path(spec.origin).parent.rglob("*.py"))
    known = set(pydoc_passages())
    return [text for text in passages(_docstrings(modules)) if text not in known]


def _docstrings(modules: Iterable[pathlib.Path]) -> Iterator[str]:
    """Yields the docstrings of each module as one text."""
    for path in modules:
        source = path.read_text(encoding="utf-8", errors="replace")
        yield "\n\n".join(map(inspect.cleandoc, _DOCSTRING.findall(source)))


class _Passages(ItemSource):
    """Passages of Python's own text, every tenth of them held out, and for training JAX's."""

    def __init__(self):
        super().__init__(("train", "validation"))

    def items(self, split: str) -> tuple[tf.data.Dataset, int]:
        texts = pydoc_passages()
        found = texts[1::_HOLDOUT_EVERY]
        if split == "train":
            held_out = set(found)
            found = [text for text in texts if text not in held_out] + jax_passages()
        return tf.data.Dataset.from_tensor_slices(found), len(found)

    def examples(self, split: str, items: tf.data.Dataset) -> tf.data.Dataset:
        return items.map(lambda text: {"text": text})


def pydoc_words() -> seqio.Task:
    """Returns word recall in the text of Python and JAX; some of Python's is held out."""
    vocabulary = seqio.SentencePieceVocabulary(VOCABULARY_FILE, extra_ids=sentinels.T5_SENTINELS)
    feature = seqio.Feature(vocabulary=vocabulary, add_eos=True)
    return seqio.Task(
        "pydoc_words",
        source=_Passages(),
        preprocessors=[
            span_corruption.text_as_targets,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.CacheDatasetPlaceholder(),
            functools.partial(mask_recurring_words, least=2),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[],
    )


registration.add(pydoc_words())
