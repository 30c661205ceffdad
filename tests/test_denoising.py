"""Denoisers lose no text, fill the lengths they are given, and mix at their rates."""

import numpy as np
import pytest
import seqio
import task_examples
import tensorflow as tf
from convt5.tasks import denoising, pretraining, synthetic, vocabularies

from convt5 import data, errors

LENGTHS = {"inputs": 64, "targets": 32}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list("abcdefgh "), 300)) for _ in range(30)]
    (folder / "text.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield pretraining.text_span_corruption(str(folder / "text.txt"), validation_fraction=0)


def examples(task, lengths=LENGTHS, num=-1, seed=0):
    return task_examples.examples(task, "train", lengths, num=num, seed=seed, num_epochs=1)


def decoded(example, name):
    return vocabularies.characters().decode(example[name][:-1].tolist())


class TestPrefixLm:
    def test_targets_continue_inputs_and_nothing_is_lost(self, corpus):
        task = denoising.prefix_lm(corpus)
        found = "".join(decoded(e, "inputs") + decoded(e, "targets") for e in examples(task))
        original = corpus.source.get_dataset("train", shuffle=False).as_numpy_iterator()
        assert found == "".join(document["text"].decode() for document in original)

    def test_lengths_fit_and_end_with_the_end_token(self, corpus):
        for example in examples(denoising.prefix_lm(corpus)):
            assert len(example["inputs"]) <= 64
            assert 2 <= len(example["targets"]) <= 32
            assert example["inputs"][-1] == example["targets"][-1] == 1

    def test_the_mean_share_of_targets_is_the_density(self, corpus):
        found = examples(
            denoising.prefix_lm(corpus, noise_density=0.25), {"inputs": 64, "targets": 64}
        )
        shares = [(len(e["targets"]) - 1) / 64 for e in found[:-1]]
        assert np.mean(shares) == pytest.approx(0.25, abs=0.04)
        assert max(shares) <= 0.5

    @pytest.mark.slow
    def test_places_to_split_follow_from_the_seed(self, corpus):
        task = denoising.prefix_lm(corpus)
        one, again, other = (
            [len(e["targets"]) for e in examples(task, seed=seed)] for seed in (0, 0, 1)
        )
        assert one == again != other

    @pytest.mark.parametrize("density", [0.0, 0.6])
    def test_the_density_has_limits(self, corpus, density):
        with pytest.raises(errors.UserError, match=rf"noise_density={density} must be in"):
            denoising.prefix_lm(corpus, noise_density=density)

    def test_lengths_without_room_are_refused(self, corpus):
        task = denoising.prefix_lm(corpus, mode="[S] ")
        with pytest.raises(errors.UserError, match=r"encoder_length=5 .* hold no text"):
            examples(task, {"inputs": 5, "targets": 32})


class TestUl2:
    def test_seven_denoisers_are_mixed_evenly(self, corpus):
        mixture = denoising.ul2(corpus)
        assert len(mixture.tasks) == 7
        assert {mixture.get_rate(task) for task in mixture.tasks} == {1.0}

    def test_rates_divide_among_the_kinds(self, corpus):
        mixture = denoising.ul2(corpus, regular_rate=1, sequential_rate=2, extreme_rate=0)
        assert {task.name: mixture.get_rate(task) for task in mixture.tasks} == {
            "ul2_r0": 0.5,
            "ul2_r1": 0.5,
            "ul2_s": 2,
        }

    @pytest.mark.slow
    def test_inputs_begin_with_their_mode_and_one_side_is_full(self, corpus):
        found = {}
        for task in denoising.ul2(corpus).tasks:
            (example,) = examples(task, num=1)
            mode = decoded(example, "inputs")[:4]
            found[mode] = found.get(mode, 0) + 1
            spare = [LENGTHS[name] - len(example[name]) for name in LENGTHS]
            assert min(spare) >= 0
            assert min(spare) <= 2 or mode == "[S] "
            assert example["targets"][-1] == 1
        assert found == {"[R] ": 2, "[S] ": 1, "[X] ": 4}

    @pytest.mark.slow
    def test_modes_may_be_left_out(self, corpus):
        first = denoising.ul2(corpus, modes=False).tasks[0]
        assert not decoded(examples(first, num=1)[0], "inputs").startswith("[")

    @pytest.mark.slow
    def test_batches_go_on_at_a_saved_position(self, corpus):
        mixture = denoising.ul2(corpus, regular_rate=0.5, extreme_rate=0)
        config = data.DataConfig(
            mixture=mixture, batch_size=4, encoder_length=64, decoder_length=32
        )
        batches = config.build(process_index=0, process_count=1)
        next(batches)
        position = batches.get_state()
        expected = next(batches)["decoder_target_tokens"]
        again = config.build(process_index=0, process_count=1)
        again.set_state(position)
        np.testing.assert_array_equal(next(again)["decoder_target_tokens"], expected)

    @pytest.mark.parametrize(
        "rates", [(-1, 1, 1), (0, 0, 0), (1, float("nan"), 1), (1, 1, float("inf"))]
    )
    def test_rates_that_mix_nothing_are_refused(self, corpus, rates):
        names = ("regular_rate", "sequential_rate", "extreme_rate")
        with pytest.raises(errors.UserError, match="must be at least 0, and one of them more"):
            denoising.ul2(corpus, **dict(zip(names, rates, strict=True)))


def test_sentinels_limit_a_segment():
    feature = seqio.Feature(vocabularies.characters(num_sentinels=5))
    tokens = tf.data.Dataset.from_tensors({"targets": tf.range(3, 203)})
    dataset = denoising.fit_span_corruption(
        tokens,
        {"inputs": 100, "targets": 100},
        {"targets": feature},
        noise_density=0.5,
        mean_span_length=3.0,
    )
    example = next(iter(dataset))
    assert (example["targets"].numpy() >= 259).sum() == 5


def test_lengths_too_short_for_a_span_are_refused(corpus):
    task = denoising.ul2(corpus).tasks[0]
    with pytest.raises(errors.UserError, match=r"hold no corrupted text with noise_density=0.15"):
        examples(task, {"inputs": 6, "targets": 32})


def test_a_corpus_must_be_a_task():
    with pytest.raises(errors.UserError, match="corpus='c4' is no task"):
        denoising.prefix_lm("c4")


def test_a_corpus_must_have_documents():
    task = denoising.prefix_lm(synthetic.gap_copy())
    with pytest.raises(errors.UserError, match=r"'text', and its source has \['inputs', 'targets'"):
        data.DataConfig(mixture=task, batch_size=1, encoder_length=9, decoder_length=9).describe()


@pytest.mark.parametrize("corpus_name", ["pydoc", "c4"])
def test_objectives_are_registered_beside_span_corruption(corpus_name):
    own = seqio.get_mixture_or_task(f"{corpus_name}_span_corruption").source
    assert type(seqio.get_mixture_or_task(f"{corpus_name}_prefix_lm").source) is type(own)
    assert len(seqio.get_mixture_or_task(f"{corpus_name}_ul2").tasks) == 7
