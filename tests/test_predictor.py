"""Predictions: in the order of the inputs, whatever they are computed with; in few shapes."""

import argparse
import dataclasses
import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import seqio
import tiny_run
from convt5.tasks import vocabularies

from convt5.errors import TrainingError, UserError
from convt5.evaluation import hosts
from convt5.evaluation.batching import PADDING_ROW, length_bucket, plan_batches
from convt5.evaluation.flags import PREDICT_FLAGS
from convt5.evaluation.predictor import Predictor, decode_text, encode_text, truncate
from convt5.evaluation.settings import EvalConfig, PredictConfig, Rank, from_flags
from convt5.generation import decoding
from convt5.generation.search import BeamSearch, Greedy, Sampling
from convt5.modeling import sharding
from convt5.modeling.architecture import TextStemConfig
from convt5.text import task_format

BYTES = vocabularies.characters()
TEXTS = ["good", "a film", "", "so so"]  # One shape: tests share the compilation.
SHORT = {"max_length": 6, "max_input_length": 24}


@pytest.fixture(scope="module")
def model():
    return tiny_run.make_model()


def predictor(model, strategy=None, **settings) -> Predictor:
    config = PredictConfig(strategy=strategy or Greedy(), **{**SHORT, "batch_size": 4, **settings})
    return Predictor(model, BYTES, config)


lengths_of_examples = st.lists(st.integers(1, 100), max_size=40)


@hypothesis.given(lengths_of_examples, st.integers(1, 7))
def test_every_example_is_in_one_batch_that_it_fits(lengths, rows):
    batches = plan_batches(lengths, rows=rows, longest=100)
    assert sorted(i for b in batches for i in b.examples if i != PADDING_ROW) == list(
        range(len(lengths))
    )
    assert all(len(batch.examples) == rows for batch in batches)
    assert all(lengths[i] <= b.length <= 100 for b in batches for i in b.examples if i >= 0)
    assert len(batches) == math.ceil(len(lengths) / rows)


def test_shapes_are_bounded_by_the_logarithm_of_the_longest_input():
    shapes = {length_bucket(length, 500) for length in range(1, 501)}
    assert len(shapes) <= 2 * math.log2(500)
    assert max(shapes) == 500


@hypothesis.given(lengths_of_examples, st.integers(1, 5))
def test_hosts_share_all_examples_evenly(lengths, num_hosts):
    shares = [
        hosts.share(lengths, process_index=i, process_count=num_hosts) for i in range(num_hosts)
    ]
    assert sorted(itertools.chain(*shares)) == list(range(len(lengths)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_results_of_hosts_come_together_in_order(monkeypatch):
    """Hosts with different amounts of text: what is gathered has one size."""
    parts = {0: (["long " * 9, 0.1], [0, 2]), 1: (["b"], [1])}
    texts = {i: None for i in parts}
    for i, (values, examples) in parts.items():
        texts[i] = json.dumps(list(zip(examples, values, strict=True))).encode()
    longest = max(map(len, texts.values()))

    def gathered(own):
        if own.ndim == 0:
            return np.array([len(text) for text in texts.values()])
        assert own.shape == (longest,)
        return np.stack([np.frombuffer(t.ljust(longest, b"\0"), np.uint8) for t in texts.values()])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gathered)
    for values, examples in parts.values():
        assert hosts.merge(values, examples) == ["long " * 9, "b", 0.1]


@pytest.mark.parametrize(
    "text", ["plain", "<extra_id_0> first", "two<extra_id_1><extra_id_0> é", "<extra_id_999>"]
)
def test_sentinels_stand_in_texts_of_any_vocabulary(text):
    ids = encode_text(BYTES, text)
    assert decode_text(BYTES, [*ids, 1, 77]) == text
    if text.startswith("<extra_id_0>"):
        assert ids[0] == BYTES.vocab_size - 1


def test_sentinels_stand_beside_letters_in_texts_of_sentencepiece(shared_data):
    """To the model itself they are sentinels behind a blank alone."""
    words = vocabularies.sentencepiece(str(shared_data / "vocab" / "t5_cc_all_32000.model"))
    first = words.vocab_size - 1
    for text in ("a<extra_id_0>b", "(<extra_id_0>) b", "<extra_id_0><extra_id_1>"):
        ids = encode_text(words, text)
        assert first in ids
        assert 2 not in ids
    for text in ("Thank you <extra_id_0> me to <extra_id_1> week.", "<extra_id_0> b", "no mark"):
        assert encode_text(words, text) == list(words.encode(text))


def test_a_cut_input_keeps_its_end_token():
    assert truncate([5, 6, 7, 1], 3, 1) == ([5, 6, 1], 1)
    assert truncate([5, 6, 7, 8], 3, 1) == ([5, 6, 7], 1)
    assert truncate([5, 1], 3, 1) == ([5, 1], 0)


@pytest.mark.parametrize(
    "strategy",
    [Greedy(), BeamSearch(beam_size=2), Sampling(num_results=2)],
    ids=lambda s: type(s).__name__,
)
def test_a_prediction_depends_on_its_own_input_alone(model, strategy):
    subject = predictor(model, strategy)
    together = subject.predict(TEXTS)
    assert len({found.tokens for found in together}) == len(TEXTS)
    for number, text in enumerate(TEXTS):
        (alone,) = subject.predict_tokens([subject.encode(text)], first_number=number, rows=4)
        assert alone.tokens == together[number].tokens
        np.testing.assert_allclose(alone.scores, together[number].scores, rtol=1e-5)


def test_all_bits_of_a_seed_count(model):
    one, other = (
        predictor(model, Sampling(num_results=2), seed=seed).predict(TEXTS) for seed in (0, 2**32)
    )
    assert [found.tokens for found in one] != [found.tokens for found in other]


def test_few_shapes_are_computed(model, monkeypatch):
    """What `decoding` compiles is one program for each shape of sources."""
    shapes = []

    def search(model, inputs, *, strategy, **_):
        shapes.append(inputs.encoder_input_tokens.shape)
        rows = shapes[-1][0]
        one = np.ones((rows, 1))
        found = decoding.Found(np.ones((rows, 1, 8), int), one.astype(int), one, one, one > 0)
        return jax.tree.map(jax.numpy.asarray, found)

    monkeypatch.setattr(decoding, "_search", search)
    texts = [letter * length for length in (1, 5, 7, 9, 11, 13, 20) for letter in "abc"]
    predictor(model).predict(texts)
    predictor(model).predict(reversed(texts))
    assert len(shapes) == 2 * math.ceil(len(texts) / 4)
    assert set(shapes) <= {(4, length) for length in (8, 12, 16, 24)}


def test_the_score_of_a_prediction_is_that_with_which_it_was_found(model):
    greedy = predictor(model)
    found = greedy.predict(TEXTS)
    scored = greedy.score_tokens([greedy.encode(t) for t in TEXTS], [f.tokens[0] for f in found])
    np.testing.assert_allclose(
        [score.log_prob for score in scored], [f.scores[0] for f in found], rtol=1e-5
    )
    assert [score.num_tokens for score in scored] == [len(f.tokens[0]) for f in found]


def test_padding_at_the_end_of_a_target_is_scored(model):
    targets = [[5], [5, 0], [5, 0, 0], [5, 0, 0, 1]]
    scores = predictor(model).score_tokens([BYTES.encode("a")] * 4, targets)
    each = -np.diff([0.0, *(score.log_prob for score in scores)])
    assert np.all(each > 0)


def test_the_targets_of_texts_are_scored_with_their_end_token(model):
    targets = ["yes", "", "no", "no"]
    scores = predictor(model).score(TEXTS, targets)
    assert [score.num_tokens for score in scores] == [4, 1, 3, 3]
    ids = [[*BYTES.encode(target), 1] for target in targets]
    assert scores == predictor(model).score_tokens([predictor(model).encode(t) for t in TEXTS], ids)


@pytest.mark.parametrize(
    ("add_eos", "without_end", "ends"),
    [
        (True, (), (True, True)),
        (False, (), (False, False)),
        (True, ("targets",), (True, False)),
        (False, ("inputs",), (False, True)),
        (False, ("inputs", "targets"), (False, False)),
    ],
)
def test_inputs_and_targets_end_as_in_training(model, add_eos, without_end, ends):
    asked = task_format.plain("symbols", labels=("no", "not"), without_end=without_end)
    config = PredictConfig(**SHORT, batch_size=4)
    subject = Predictor(model, BYTES, config, add_eos=add_eos, format=asked)
    given, targets = subject.encode("ab"), subject.predict(TEXTS[:1])[0].tokens
    assert given == BYTES.encode("ab") + [1] * ends[0]
    assert {*targets} == {(*BYTES.encode(label), *[1] * ends[1]) for label in ("no", "not")}
    (score,) = subject.score(TEXTS[:1], ["no"])
    assert score.num_tokens == 2 + ends[1]


def test_a_mesh_of_two_devices_predicts_the_same(model):
    mesh = sharding.MeshConfig().build(jax.devices()[:2])
    placed = jax.device_put(model, sharding.replicated(mesh))
    config = PredictConfig(**SHORT, batch_size=4)
    spread = Predictor(placed, BYTES, config, mesh=mesh)
    for one, other in zip(predictor(model).predict(TEXTS), spread.predict(TEXTS), strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5)


def test_long_inputs_are_cut_and_counted_or_refused(model):
    long = "x" * 30
    subject = predictor(model)
    # 30 letters and the end, of which 24 stay.
    assert subject.fit(subject.encode(long), 0) == ([*BYTES.encode("x" * 23), 1], 7)
    given = ["short", long]
    for results in (subject.predict(given), subject.score(given, ["no", "no"])):
        assert [result.truncated for result in results] == [0, 7]
    with pytest.raises(UserError, match=r"input 2 has 31 tokens, but max_input_length=24"):
        predictor(model, long_inputs="refuse").predict(["short", long])


def test_an_input_without_tokens_is_refused(model):
    with pytest.raises(UserError, match="input 1 is empty"):
        predictor(model).predict_tokens([[]])
    with pytest.raises(UserError, match="input 1 is 70, but must be a list of token ids; a single"):
        predictor(model).predict_tokens([70, 1])


@pytest.mark.parametrize("call", ["predict", "score"])
def test_one_text_is_no_list_of_its_letters(model, call):
    arguments = ("good film",) if call == "predict" else (["good film"], "yes")
    with pytest.raises(UserError, match=r"is a single text, but must be a list of texts; give \["):
        getattr(predictor(model), call)(*arguments)


@pytest.mark.parametrize("targets", [["x", "y"], []])
def test_every_target_has_its_input(model, targets):
    with pytest.raises(UserError, match=rf"{len(targets)} targets for 1 inputs"):
        predictor(model).score(["a"], targets)
    with pytest.raises(UserError, match=rf"{len(targets)} targets for 1 inputs"):
        predictor(model).score_choices([[5, 1]], [[[5, 1]] for _ in targets])


def test_a_text_with_halves_of_characters_is_refused(model):
    with pytest.raises(UserError, match=r"the text 'a\\udcff' is not UTF-8"):
        predictor(model).predict(["a\udcff"])


@pytest.mark.parametrize(
    "strategy", [Greedy(), BeamSearch(beam_size=2), Rank()], ids=lambda s: type(s).__name__
)
def test_a_model_that_computes_no_numbers_answers_nothing(model, strategy):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, model)
    labels = task_format.plain("reviews", labels=("yes", "no"))
    config = PredictConfig(strategy=strategy, **SHORT, batch_size=4)
    with pytest.raises(TrainingError, match=r"scores for input 8 are not numbers \(NaN\)"):
        Predictor(broken, BYTES, config, format=labels).predict(TEXTS, first_number=7)


def test_ids_that_stand_for_no_text_are_shown_as_numbers(model):
    vocabulary = seqio.PassThroughVocabulary(size=64, eos_id=1)
    assert decode_text(vocabulary, [5, 7, 1, 9]) == "5 7"
    subject = Predictor(model, vocabulary, PredictConfig(**SHORT), add_eos=False)
    (found,) = subject.predict_tokens([[3, 4, 1]])
    kept = [i for i in itertools.takewhile(lambda i: i != 1, found.tokens[0]) if i < 64]
    assert found.texts == (" ".join(map(str, kept)),)


def test_nothing_in_is_nothing_out(model):
    assert predictor(model).predict([]) == []
    assert predictor(model).score([], []) == []


def test_a_larger_vocabulary_than_the_models_is_refused(model):
    with pytest.raises(UserError, match=r"459 ids, .* vocab_size=384"):
        Predictor(model, vocabularies.characters(num_sentinels=200))


def flags(**given) -> dict:
    names = [flag.name for flag in PREDICT_FLAGS]
    return vars(argparse.Namespace(**{name: given.pop(name, None) for name in names}))


def test_flags_win_over_settings():
    config = PredictConfig(strategy=BeamSearch(beam_size=2), max_length=9, seed=3)
    changed = from_flags(config, flags(length_penalty=0.5, max_length=7))
    assert changed.strategy == BeamSearch(beam_size=2, length_penalty=0.5)
    assert (changed.max_length, changed.seed) == (7, 3)
    assert from_flags(config, flags(strategy="sampling", top_k=3)).strategy == Sampling(top_k=3)
    assert from_flags(config, flags()) == config


def test_flags_of_a_beam_win_one_by_one():
    config = PredictConfig(strategy=BeamSearch(beam_size=4, length_penalty=0.6))
    for given in ({}, {"strategy": "beam"}):
        for size in (2, 8):
            changed = from_flags(config, flags(beam_size=size, **given))
            assert changed.strategy == BeamSearch(beam_size=size, length_penalty=0.6)
            assert changed.described()["strategy"]["num_results"] == size
    chosen = from_flags(config, flags(strategy="beam", num_results=2)).strategy
    assert chosen == BeamSearch(beam_size=4, length_penalty=0.6, num_results=2)
    with pytest.raises(UserError, match="num_results=2 must be between 1 and beam_size=1"):
        from_flags(PredictConfig(strategy=chosen), flags(beam_size=1))


def test_settings_are_described_as_earlier_versions_did():
    """Or their outputs could not be resumed."""
    assert PredictConfig(strategy=BeamSearch(beam_size=3)).described()["strategy"] == {
        "name": "BeamSearch",
        "beam_size": 3,
        "length_penalty": 1.0,
        "num_results": 3,
        "early_stopping": False,
    }


def test_a_flag_of_another_strategy_names_the_one_it_needs():
    with pytest.raises(UserError, match=r"--beam_size=4 does not apply to Greedy.*--strategy=beam"):
        from_flags(PredictConfig(), flags(beam_size=4))
    with pytest.raises(UserError, match=r"--seed=4 does not apply to beam.*--strategy=sampling as"):
        from_flags(PredictConfig(), flags(strategy="beam", seed=4))
    assert from_flags(PredictConfig(strategy=Sampling()), flags(seed=4)).seed == 4


def test_lengths_come_from_training_and_fit_the_model():
    learned = tiny_run.CONFIG.__class__(
        **{**vars(tiny_run.CONFIG), "positions": "learned", "max_positions": 40}
    )
    assert PredictConfig().completed(tiny_run.CONFIG).max_input_length == 512
    assert PredictConfig().completed(learned).task_lengths() == {"inputs": 40, "targets": 40}
    trained = {"max_input_length": 30, "max_length": None}
    assert PredictConfig().completed(learned, trained).max_input_length == 30
    with pytest.raises(UserError, match=r"max_length=41 is longer than .* max_positions=40"):
        PredictConfig(max_length=41).completed(learned)


def test_an_input_may_be_as_long_as_the_positions_behind_the_stem():
    settings = {"positions": "learned", "max_positions": 40}
    stem = TextStemConfig(strides=[2, 2])
    model = dataclasses.replace(tiny_run.CONFIG, stem=stem, **settings)
    assert PredictConfig().completed(model).task_lengths() == {"inputs": 160, "targets": 40}
    trained = {"max_input_length": 157, "max_length": 8}
    assert PredictConfig().completed(model, trained).max_input_length == 157
    with pytest.raises(UserError, match=r"max_input_length=161 is longer than .*at most 160"):
        PredictConfig(max_input_length=161).completed(model)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_of_more_than_64_bits_is_refused(seed):
    jax.random.key(PredictConfig(seed=2**63 - 1).seed)
    for config in (PredictConfig, EvalConfig):
        with pytest.raises(UserError, match=f"seed={seed} must fit into 64 bits"):
            config(seed=seed)


def test_a_sentinel_of_endless_digits_is_text(model):
    text = f"a <extra_id_{'9' * 5000}>"
    assert predictor(model).encode(text) == [*BYTES.encode(text), 1]


def test_sizes_that_no_memory_holds_are_refused():
    names = ("max_length", "max_input_length", "batch_size")
    with pytest.raises(UserError, match="3 faults") as caught:
        PredictConfig(**dict.fromkeys(names, 10**9))
    assert str(caught.value).count("=1000000000 must be at most 16,777,216") == 3


def test_impossible_settings_are_reported_together():
    with pytest.raises(UserError, match=r"(?s)max_length=0.*batch_size=0.*long_inputs='cut'"):
        PredictConfig(max_length=0, batch_size=0, long_inputs="cut")
    with pytest.raises(UserError, match="long_inputs=None must be one of truncate, refuse"):
        PredictConfig(long_inputs=None)


def test_what_is_no_list_of_texts_is_refused(model):
    used = predictor(model)
    for texts in (None, 7, {"a", "b"}, b"ab", {"text": "a"}):
        with pytest.raises(UserError, match=r"texts=.* must be a list of texts"):
            used.predict(texts)
    with pytest.raises(UserError, match="the text None is none"):
        used.score(["a"], [None])


def test_ids_that_are_no_integers_and_rows_that_are_no_count_are_refused(model):
    used = predictor(model)
    with pytest.raises(UserError, match=r"token ids \[1.5, 2\] are float64"):
        used.predict_tokens([[1.5, 2]])
    for ids in ([2**32 + 5, 1], [-(2**32), 1]):
        with pytest.raises(UserError, match=f"holds the id {ids[0]}, but the model's vocab_size"):
            used.predict_tokens([ids])
        with pytest.raises(UserError, match=f"targets holds the id {ids[0]}, but the model's"):
            used.score_tokens([[5, 1]], [ids])
    for rows in (0, -1, 2.5):
        with pytest.raises(UserError, match=f"rows={rows} must be an integer of at least 1"):
            used.predict_tokens([[5, 1]], rows=rows)


@pytest.mark.parametrize(
    "settings",
    [{"max_length": "6"}, {"batch_size": 2.5}, {"strategy": "beam"}, {"seed": 1.5}, {"seed": "a"}],
    ids=str,
)
def test_settings_of_a_wrong_type_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(UserError, match=f"PredictConfig: {name}={value!r} must"):
        PredictConfig(**settings)
