"""Span corruption inverts, has T5's density and span lengths, and gives T5's ids."""

import numpy as np
import pytest
import seqio
import tensorflow as tf
from convt5.tasks import span_corruption
from hypothesis import given, settings
from hypothesis import strategies as st

from convt5 import errors

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
FEATURES = {name: seqio.Feature(VOCABULARY) for name in ("inputs", "targets")}
FIRST_SENTINEL = VOCABULARY.vocab_size - 1


@tf.function(
    input_signature=[
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([2], tf.int32),
        tf.TensorSpec([], tf.float32),
        tf.TensorSpec([], tf.float32),
    ]
)
def corrupt(tokens, seed, noise_density, mean_span_length):
    return span_corruption.corrupt(
        tokens,
        seed,
        first_sentinel=FIRST_SENTINEL,
        noise_density=noise_density,
        mean_span_length=mean_span_length,
    )


def corrupted(tokens, *, seed=0, noise_density=0.15, mean_span_length=3.0):
    example = corrupt(tokens, [seed, 1], noise_density, mean_span_length)
    return example["inputs"].numpy(), example["targets"].numpy()


def is_sentinel(tokens):
    return np.asarray(tokens) > FIRST_SENTINEL - VOCABULARY.extra_ids


def spans_by_sentinel(tokens):
    """What follows each sentinel, up to the next."""
    starts = np.flatnonzero(is_sentinel(tokens))
    parts = np.split(tokens, starts)[1:]
    return {int(part[0]): part[1:] for part in parts}


def restored(inputs, targets):
    """Puts each span of the targets in the place of its sentinel."""
    spans = spans_by_sentinel(targets)
    parts = [spans[int(t)] if is_sentinel(t) else [t] for t in inputs]
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def text(length, seed=0):
    return np.random.default_rng(seed).integers(3, 259, length, dtype=np.int32)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 390),  # Half of it in spans of two just has its 100 sentinels.
    seed=st.integers(0, 2**31 - 1),
    noise_density=st.sampled_from([0.1, 0.15, 0.3, 0.5]),
    mean_span_length=st.sampled_from([2.0, 3.0, 10.0]),
)
def test_targets_put_in_place_of_sentinels_give_back_the_text(
    length, seed, noise_density, mean_span_length
):
    tokens = text(length)
    inputs, targets = corrupted(
        tokens, seed=seed, noise_density=noise_density, mean_span_length=mean_span_length
    )
    np.testing.assert_array_equal(restored(inputs, targets), tokens)


def test_sentinels_descend_from_the_last_id_and_inputs_begin_with_text():
    inputs, targets = corrupted(text(200))
    expected = FIRST_SENTINEL - np.arange(is_sentinel(inputs).sum())
    np.testing.assert_array_equal(inputs[is_sentinel(inputs)], expected)
    np.testing.assert_array_equal(targets[is_sentinel(targets)], expected)
    assert not is_sentinel(inputs[0])
    assert is_sentinel(targets[0])


def test_noise_density_and_mean_span_length_hold():
    tokens = text(568)
    spans = [
        span
        for seed in range(40)
        for span in spans_by_sentinel(corrupted(tokens, seed=seed)[1]).values()
    ]
    lengths = np.array([len(span) for span in spans])
    assert lengths.sum() / (40 * len(tokens)) == pytest.approx(0.15, abs=0.001)
    assert lengths.mean() == pytest.approx(3.0, abs=0.1)
    # Spans are drawn, not cut evenly: the number of one-token spans is about geometric.
    assert 0.2 < (lengths == 1).mean() < 0.5


def test_every_position_is_taken_out_about_equally_often():
    tokens = np.arange(3, 103, dtype=np.int32)
    counts = np.zeros(103)
    for seed in range(400):
        _, targets = corrupted(tokens, seed=seed)
        counts[targets[~is_sentinel(targets)]] += 1
    # The first token is never noise and the last always is, as in T5.
    share = counts[3:].reshape(10, 10).mean(axis=1) / 400
    assert share[1:-1] == pytest.approx(np.full(8, 0.13), abs=0.03)


@pytest.mark.parametrize("inputs_length", [8, 30, 64, 128, 256, 512, 1024])
def test_segments_fill_the_encoder_and_no_longer_one_would_fit(inputs_length):
    sizes = span_corruption.segment_sizes(inputs_length)
    inputs, targets = corrupted(text(sizes.text))
    longer, _ = corrupted(text(sizes.text + 1))
    # One more for the end token.
    assert (len(inputs) + 1, len(targets) + 1) == (sizes.inputs, sizes.targets)
    assert len(inputs) + 1 <= inputs_length < len(longer) + 1
    assert is_sentinel(inputs).sum() == sizes.spans


def test_t5_pretraining_lengths_come_out():
    assert span_corruption.segment_sizes(512) == (568, 512, 114, 28)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_texts_still_make_an_example(length):
    inputs, targets = corrupted(text(length))
    assert len(inputs) >= 1
    np.testing.assert_array_equal(inputs[:1], text(length)[:1])
    assert len(targets) >= 1


def examples_of(documents, *, inputs=32, targets=16, **arguments):
    dataset = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(documents, tf.int32)).map(
        lambda tokens: {"targets": tokens}
    )
    with seqio.map_seed_manager(7):
        dataset = span_corruption.span_corruption(
            dataset, {"inputs": inputs, "targets": targets}, FEATURES, **arguments
        )
        return [(e["inputs"].numpy(), e["targets"].numpy()) for e in dataset]


@pytest.mark.parametrize("merge_documents", [True, False])
def test_no_text_of_long_documents_is_lost(merge_documents):
    documents = [text(n, seed=n).tolist() for n in (500, 3, 70, 1, 33)]
    found = examples_of(documents, merge_documents=merge_documents)
    # Sentinels of each example count from the first again, so that each is restored alone.
    whole = np.concatenate([restored(*example) for example in found if len(example[0]) > 1])
    lost = sum(len(d) for d in documents) - len(whole)
    # A text of one token has nothing to restore: the pair holds the token itself.
    assert lost == sum(len(example[0]) == 1 for example in found)
    np.testing.assert_array_equal(whole[:500], documents[0])


def test_merged_documents_leave_no_padding_before_the_last_segment():
    documents = [text(n, seed=n).tolist() for n in (10, 20, 30, 40, 100)]
    found = examples_of(documents, merge_documents=True)
    size = span_corruption.segment_sizes(32)
    assert {len(inputs) + 1 for inputs, _ in found[:-1]} == {size.inputs}


def test_segments_end_with_their_document_when_not_merged():
    documents = [[5] * 10, [6] * 10]
    found = examples_of(documents, merge_documents=False)
    assert [set(restored(*example)) for example in found] == [{5}, {6}]


def test_targets_that_do_not_fit_the_decoder_are_an_error():
    with pytest.raises(errors.UserError, match=r"decoder_length=113 .* set decoder_length to at "):
        examples_of([[5] * 10], inputs=512, targets=113)


def test_more_spans_than_sentinels_are_an_error():
    with pytest.raises(errors.UserError, match="has 100 sentinels, but encoder_length=4096 takes"):
        examples_of([[5] * 10], inputs=4096, targets=4096)


def test_an_encoder_too_short_for_text_is_an_error():
    with pytest.raises(errors.UserError, match=r"encoder_length=2 holds no corrupted text; .* 3"):
        span_corruption.segment_sizes(2)


def test_a_density_that_leaves_no_text_is_answered_with_the_targets_it_takes():
    nearly_all = {"noise_density": 1 - 1e-8}
    assert span_corruption.segment_sizes(3, **nearly_all).targets > 10**9
    with pytest.raises(errors.UserError, match="decoder_length=64 is too short for the spans"):
        examples_of([[5] * 10], inputs=64, targets=64, **nearly_all)


@pytest.mark.parametrize(
    ("noise_density", "mean_span_length"), [(0.5, 1.0), (0.6, 1.0), (0.8, 2.0), (0.95, 1.0)]
)
@pytest.mark.parametrize("length", [2, 3, 31, 100])
def test_spans_are_never_more_than_the_tokens_between_them(length, noise_density, mean_span_length):
    tokens = text(length)
    settings = {"noise_density": noise_density, "mean_span_length": mean_span_length}
    inputs, targets = corrupted(tokens, **settings)
    np.testing.assert_array_equal(restored(inputs, targets), tokens)
    sizes = span_corruption.segment_sizes(len(inputs) + 1, **settings)
    assert sizes.text >= length
    assert sizes.inputs <= len(inputs) + 1


@pytest.fixture(scope="module")
def published():
    """The published preprocessors, where they are installed."""
    return pytest.importorskip("t5.data.preprocessors", exc_type=ImportError)


@pytest.mark.parametrize("length", [2, 7, 40, 301, 568])
def test_the_same_seed_gives_t5s_ids(published, length):
    tokens = text(length)
    expected = published.single_example_denoise(
        {"targets": tf.constant(tokens)},
        tf.constant([3, 1]),
        output_features=FEATURES,
        noise_density=0.15,
        noise_mask_fn=published.random_spans_noise_mask,
        inputs_fn=published.noise_span_to_unique_sentinel,
        targets_fn=published.nonnoise_span_to_unique_sentinel,
    )
    inputs, targets = corrupted(tokens, seed=3)
    np.testing.assert_array_equal(inputs, expected["inputs"])
    np.testing.assert_array_equal(targets, expected["targets"])


@pytest.mark.parametrize("inputs_length", [16, 100, 256, 512, 1024])
@pytest.mark.parametrize("mean_span_length", [3.0, 5.0])
def test_segments_are_as_long_as_t5s(published, inputs_length, mean_span_length):
    expected = published.random_spans_helper(
        inputs_length=inputs_length,
        noise_density=0.15,
        mean_noise_span_length=mean_span_length,
        extra_tokens_per_span_inputs=1,
        extra_tokens_per_span_targets=1,
    )
    sizes = span_corruption.segment_sizes(inputs_length, mean_span_length=mean_span_length)
    assert (sizes.text, sizes.targets) == expected


@pytest.mark.slow
def test_the_whole_pipeline_cuts_text_as_t5_does(published):
    documents = [text(n, seed=n).tolist() for n in (300, 90, 250)]
    lengths = {"inputs": 64, "targets": 32}
    dataset = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(documents, tf.int32))
    dataset = published.span_corruption(
        dataset.map(lambda tokens: {"targets": tokens}), lengths, FEATURES
    )
    expected = [(e["inputs"].numpy(), e["targets"].numpy()) for e in dataset]
    found = examples_of(documents, inputs=64, targets=32)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(restored(*ours), restored(*theirs))
