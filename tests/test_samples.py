"""Samples of span corruption read as text: sentinels numbered, spaces kept, packed rows apart."""

import re

import jax
import numpy as np
import pytest

from convt5.errors import UserError
from convt5.generation import samples
from convt5.generation.samples import SpanExample, render, render_span_samples, span_examples
from convt5.modeling.architecture import ConvT5Config, StackConfig

END = 1
FIRST_LETTER = 3


class Letters:
    """One id for each character; ten sentinels above them."""

    eos_id = END
    extra_ids = 10
    vocab_size = FIRST_LETTER + 128 + extra_ids

    def encode(self, text: str) -> list[int]:
        """Text to ids; <n> becomes the nth sentinel."""
        ids = []
        for sentinel, letter in re.findall(r"<(\d+)>|(.)", text, re.DOTALL):
            ids.append(self.vocab_size - int(sentinel) if sentinel else self.letter(letter))
        return ids

    def decode(self, ids) -> str:
        return "".join(chr(i - FIRST_LETTER) for i in ids)

    @staticmethod
    def letter(character: str) -> int:
        return FIRST_LETTER + ord(character)


class Words:
    """Ids for words; decoding joins with spaces, so that a text never starts with one."""

    words = ("", "", "", "thank", "you", "me", "to", "week")
    eos_id = END
    extra_ids = 2
    vocab_size = len(words) + extra_ids

    def decode(self, ids) -> str:
        return " ".join(self.words[i] for i in ids)


def batch_of(*pairs: tuple[str, str]) -> dict[str, np.ndarray]:
    vocabulary = Letters()

    def rows(texts):
        ids = [[*vocabulary.encode(text), END] for text in texts]
        width = max(map(len, ids)) + 2
        return np.array([row + [0] * (width - len(row)) for row in ids], np.int32)

    return {
        "encoder_input_tokens": rows([source for source, _ in pairs]),
        "decoder_target_tokens": rows([target for _, target in pairs]),
    }


def tiny_model(vocab_size: int):
    stack = StackConfig(num_layers=1, mixing="depthwise", kernel_size=3)
    return ConvT5Config(
        vocab_size=vocab_size,
        emb_dim=8,
        mlp_dim=8,
        num_heads=1,
        head_dim=8,
        encoder=stack,
        decoder=stack,
        dtype="float32",
    ).build(jax.random.key(0))


def test_sentinels_are_numbered_from_one():
    text = "Thank you<1> me to your party<2> week."
    assert render(np.array(Letters().encode(text)), Letters()) == text


def test_rendering_stops_at_the_end_and_skips_padding():
    ids = [*Letters().encode("ab"), 0, *Letters().encode("c"), END, *Letters().encode("d")]
    assert render(np.array(ids), Letters()) == "abc"


def test_a_sample_stays_on_its_line():
    assert render(np.array(Letters().encode("a\nb")), Letters()) == "a\\nb"


def test_spaces_around_sentinels_survive_a_vocabulary_that_drops_them():
    assert render(np.array([3, 4, 9, 5, 6, 8, 7]), Words()) == "thank you<1> me to<2> week"


def test_ids_beyond_the_vocabulary_are_shown_as_unknown():
    assert render(np.array([3, Words.vocab_size, 4]), Words()) == "thank<?> you"


class Numbers:
    """Ids that stand for nothing, as `seqio.PassThroughVocabulary` has them."""

    eos_id = END
    extra_ids = 1
    vocab_size = 10

    def decode(self, ids):
        return list(ids)


def test_ids_without_a_text_are_shown_as_they_are():
    assert render(np.array([3, 4, 9, 5]), Numbers()) == "3 4<1> 5"


def test_packed_rows_are_taken_apart():
    batch = {
        "encoder_input_tokens": np.array([[5, 6, 7, 8, 0], [9, 0, 0, 0, 0]]),
        "encoder_segment_ids": np.array([[1, 1, 2, 2, 0], [1, 0, 0, 0, 0]]),
        "decoder_target_tokens": np.array([[10, 11, 12, 0], [13, 14, 0, 0]]),
        "decoder_segment_ids": np.array([[1, 2, 2, 0], [1, 1, 0, 0]]),
    }
    got = [(s.source.tolist(), s.target.tolist()) for s in span_examples(batch)]
    assert got == [([5, 6], [10]), ([7, 8], [11, 12]), ([9], [13, 14])]


def test_samples_show_corruption_filling_and_truth(monkeypatch):
    filling = np.array([*Letters().encode("<1> for asking"), END])
    monkeypatch.setattr(samples, "fill_spans", lambda model, examples, end_id: [filling])
    shown = render_span_samples(
        None, batch_of(("Thank you<1> me.", "<1> for inviting")), Letters(), num=1
    )
    assert shown == (
        "sample 1\n"
        "  corrupted: Thank you<1> me.\n"
        "  filling:   <1> for asking\n"
        "  truth:     <1> for inviting"
    )


class OneBatch:
    """Stands for a `DataConfig` with a single batch."""

    vocabulary = Letters()

    def build(self, *, process_index: int, process_count: int):
        assert (process_index, process_count) == (0, 1)
        self.left = [batch_of(("ab<1>", "<1>cd"), ("x<1>z", "<1>y"))]
        return self

    def __next__(self):
        return self.left.pop()


def test_a_run_reports_samples_of_its_data():
    shown = samples.SpanSamples(num=1)(tiny_model(Letters.vocab_size), OneBatch())
    assert "corrupted: ab<1>\n" in shown
    assert shown.endswith("truth:     <1>cd")


class WithoutVocabulary(OneBatch):
    vocabulary = None


def test_a_run_whose_data_keeps_no_vocabulary_says_that_there_is_no_sample():
    shown = samples.SpanSamples(num=1)(tiny_model(Letters.vocab_size), WithoutVocabulary())
    assert "the data keeps no vocabulary" in shown


def test_a_model_fills_as_many_examples_as_asked_for():
    batch = batch_of(("ab<1>", "<1>cd"), ("x<1>z", "<1>y"), ("m<1>", "<1>n"))
    model = tiny_model(Letters.vocab_size)
    assert render_span_samples(model, batch, Letters(), num=2).count("sample") == 2
    assert render_span_samples(model, batch, Letters(), num=5).count("sample") == 3


def test_a_filling_is_not_much_longer_than_the_truth():
    examples = [SpanExample(np.array([5, 6]), np.arange(2, 2 + n)) for n in (2, 8)]
    fillings = samples.fill_spans(tiny_model(Letters.vocab_size), examples, end_id=END)
    assert len(fillings[0]) <= 3
    assert len(fillings[1]) <= 12


def test_a_batch_of_padding_says_so():
    batch = {
        "encoder_input_tokens": np.zeros((2, 4), np.int32),
        "decoder_target_tokens": np.zeros((2, 3), np.int32),
    }
    assert "nothing but padding" in render_span_samples(tiny_model(20), batch, Letters())


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_seqio_vocabularies_render(kind, request):
    seqio = pytest.importorskip("seqio")
    if kind == "bytes":
        vocabulary = seqio.ByteVocabulary(extra_ids=100)
    else:
        folder = request.getfixturevalue("shared_data") / "vocab"
        vocabulary = seqio.SentencePieceVocabulary(
            str(folder / "t5_cc_all_32000.model"), extra_ids=100
        )
    ids = vocabulary.encode("Thank you for inviting me")
    cut = len(ids) // 2
    ids = [*ids[:cut], vocabulary.vocab_size - 1, *ids[cut:], END]
    shown = render(np.array(ids), vocabulary)
    assert re.fullmatch(r"Thank you.*<1>.*me", shown)
    assert shown.replace("<1>", "") == "Thank you for inviting me"


@pytest.mark.parametrize("num", [-1, 0, 2.5, True])
def test_a_number_of_samples_that_is_no_count_is_refused(num):
    with pytest.raises(UserError, match=f"SpanSamples: num={num} must be an integer of at least 1"):
        samples.SpanSamples(num=num)
