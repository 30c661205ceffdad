"""Predicts and scores texts with a model and its vocabulary."""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from convt5 import errors
from convt5.errors import rules
from convt5.evaluation.batching import PADDING_ROW, Batch, plan_batches, stack
from convt5.evaluation.settings import PredictConfig, Rank
from convt5.generation import decoding, samples
from convt5.generation.samples import end_id
from convt5.modeling import sharding
from convt5.modeling.layers import seed_key
from convt5.modeling.model import ConvT5
from convt5.text import sentinels, vocabulary_files
from convt5.text.task_format import FieldError, Given, TaskFormat

_SENTINEL = re.compile(f"({sentinels.MARK.pattern.replace('(', '(?:')})")

_CHOICES_PER_ROW = 4
"""Number of (short) label choices above which fewer inputs are computed together."""

Progress = Callable[[int], None]
"""Called with the number of examples computed since the last call."""


class TextVocabulary(samples.TextVocabulary, Protocol):
    """The part of `seqio.Vocabulary` needed here."""

    def encode(self, s: str, /) -> Sequence[int]: ...


class Prediction(NamedTuple):
    """The prediction for one input; each part has one entry per result.

    Results of beam search and labels are sorted best first, those of sampling in the order drawn.

    Attributes:
        texts: the results.
        scores: what they are ranked by: log-probabilities, which beam search divides by
            length ** length_penalty.
        tokens: their token ids, including the end token if generated.
        truncated: number of input tokens cut off.
        probabilities: the probability of each label in the task's order, if labels are ranked.
    """

    texts: tuple[str, ...]
    scores: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    truncated: int = 0
    probabilities: Mapping[str, float] | None = None

    @property
    def label(self) -> str | None:
        """The most likely label; None if labels are not ranked."""
        return None if self.probabilities is None else self.texts[0]


class TargetScore(NamedTuple):
    """The score of one given target.

    Attributes:
        log_prob: log-probability of the whole target, including the end token, given the input.
        num_tokens: number of its tokens.
        objective: the training objective summed over them: -log_prob plus the regularizers.
        truncated: number of input tokens cut off.
    """

    log_prob: float
    num_tokens: int
    objective: float
    truncated: int = 0


class Fitted(NamedTuple):
    """Token ids that fit a length, and how many were cut off."""

    tokens: list[int]
    truncated: int


class Predictor:
    """Predicts and scores with one model.

    Inputs may have any order and number: they are batched by length in few shapes, and results are
    in the order of the inputs. The result of an input depends only on the input, its number, and
    the settings; other shapes of batches round differently, above all in bfloat16.

    Args:
        model: the result of `load_model`.
        vocabulary: the vocabulary of inputs, and of targets unless `target_vocabulary` is given.
        config: how to predict; lengths of None get the model's defaults.
        target_vocabulary: the vocabulary of targets.
        add_eos: whether inputs and targets end with the end token, as in T5. A format that names
            those `without_end` takes its place.
        mesh: the devices of the model; None follows the placement of the model.
        format: how the task that the model was trained on writes inputs, and its labels; None uses
            texts unchanged.
        raw: uses texts unchanged even if there is a format.

    Raises:
        UserError: the vocabulary has more ids than the model has embeddings, or labels are to be
            ranked that are missing or that the vocabulary cannot distinguish.
    """

    def __init__(
        self,
        model: ConvT5,
        vocabulary: TextVocabulary,
        config: PredictConfig | None = None,
        *,
        target_vocabulary: TextVocabulary | None = None,
        add_eos: bool = True,
        mesh: Mesh | None = None,
        format: TaskFormat | None = None,
        raw: bool = False,
    ):
        self.model = model
        self.format = format
        self.raw = raw
        self.vocabulary = vocabulary
        self.target_vocabulary = target_vocabulary or vocabulary
        self.config = (config or PredictConfig()).completed(model.config)
        self._lengths = self.config.task_lengths()
        self._add_eos = add_eos
        self._batch_sharding = sharding.batch_sharding(mesh) if mesh else None
        for each in (self.vocabulary, self.target_vocabulary):
            vocabulary_files.check_size(each, model.config.vocab_size)
        self._labels = self._encode_labels()

    @property
    def strategy(self) -> Any:
        """The strategy: as configured, else ranking if the task has labels, else greedy."""
        return self.config.strategy_for(self.format)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of an input, if there are several."""
        names = self.format.fields if self.format and not self.raw else ()
        return names if len(names) > 1 else ()

    @property
    def spans_hosts(self) -> bool:
        """Whether the model is on devices of several hosts, which must then make equal calls."""
        where = self._batch_sharding
        return where is not None and not where.is_fully_addressable

    @property
    def end_id(self) -> int:
        return end_id(self.target_vocabulary)

    def predict(
        self, texts: Iterable[Given], *, raw: bool | None = None, first_number: int = 0
    ) -> list[Prediction]:
        """Returns a prediction for each text.

        Args:
            texts: inputs before the task formats them: each a text, or a mapping with its fields.
                Unformatted texts may contain the sentinels <extra_id_0>, <extra_id_1>, ...
            raw: whether to use texts unchanged; None uses the predictor's setting.
            first_number: the number of the first text, on which sampling depends.

        Raises:
            UserError: a string instead of a sequence, an empty field or invalid text, fields that
                the task does not have, or an input that is too long and must not be truncated.
            TrainingError: as `check_numbers`.
        """
        _check_several(texts=texts)
        sources = self._encode_all(texts, raw, first_number)
        predictions = self.predict_tokens(sources, first_number=first_number)
        check_numbers(predictions, first_number)
        return predictions

    def score(
        self, texts: Sequence[Given], targets: Sequence[str], *, raw: bool | None = None
    ) -> list[TargetScore]:
        """Scores each target as the answer to the text at the same position.

        Raises:
            UserError: as `predict`, or the numbers of texts and targets differ.
        """
        _check_several(texts=texts, targets=targets)
        ids = [self._with_end(encode_text(self.target_vocabulary, text)) for text in targets]
        return self.score_tokens(self._encode_all(texts, raw), ids)

    def encode(self, given: Given, *, raw: bool | None = None) -> list[int]:
        """Returns the token ids of an input of any length.

        Raises:
            FieldError: fields that the task does not have.
            UserError: the text cannot be encoded in UTF-8.
        """
        raw = self.raw if raw is None else raw
        format = None if raw else self.format
        if format is not None:
            text = format.text(given)
        elif isinstance(given, str):
            text = given
        else:
            raise FieldError(
                f"is {given!r}, but must be text: the model keeps no task that formats fields, "
                "or raw=True disables it"
            )
        ends = [end_id(self.vocabulary)] * self._ends("inputs")
        if format is None or format.sentinels:
            return [*encode_text(self.vocabulary, text), *ends]
        # In task data, a text that looks like a sentinel is ordinary letters.
        return [*self.vocabulary.encode(_checked_text(text)), *ends]

    def _ends(self, feature: str) -> bool:
        """Returns whether "inputs" or "targets" end with the end token."""
        without_end = self.format.without_end if self.format else ()
        return feature not in without_end if without_end else self._add_eos

    def _encode_all(
        self, texts: Iterable[Given], raw: bool | None, first_number: int = 0
    ) -> list[list[int]]:
        sources = []
        for number, given in enumerate(texts, start=first_number + 1):
            try:
                sources.append(self.encode(given, raw=raw))
            except FieldError as error:
                raise error.at(f"input {number}") from None
        return sources

    def _with_end(self, target: Sequence[int]) -> list[int]:
        return [*target, *[self.end_id] * self._ends("targets")]

    def _encode_labels(self) -> list[list[int]]:
        """Returns the token ids of the labels to rank, truncated as targets are in training."""
        if not isinstance(self.strategy, Rank):
            return []
        labels = self.format.labels if self.format else ()
        limit = self._lengths["targets"]
        whole = [self._with_end(self.target_vocabulary.encode(label)) for label in labels]
        ids = [truncate(tokens, limit, self.end_id).tokens for tokens in whole]
        known: dict[tuple[int, ...], str] = {}
        for label, one in zip(labels, map(tuple, ids), strict=True):
            if one in known:
                raise errors.UserError(
                    f"labels {known[one]!r} and {label!r} are the same ids in max_length={limit} "
                    "tokens of the vocabulary, so they cannot be ranked; raise max_length, or "
                    "choose another strategy than rank."
                )
            known[one] = label
        return ids

    def fit(self, tokens: Sequence[int], number: int) -> Fitted:
        """Truncates an input if it is too long.

        Raises:
            UserError: it is too long and `long_inputs="refuse"`, or it is empty or no list of ids.
        """
        limit = self._lengths["inputs"]
        if not hasattr(tokens, "__len__"):
            raise errors.UserError(
                f"input {number + 1} is {tokens!r}, but must be a list of token ids; a single "
                "input is a list of one."
            )
        if not len(tokens):
            raise errors.UserError(f"input {number + 1} is empty; leave it out.")
        if len(tokens) > limit and self.config.long_inputs == "refuse":
            raise errors.UserError(
                f"input {number + 1} has {len(tokens)} tokens, but max_input_length={limit} and "
                "long_inputs=refuse; shorten it, raise max_input_length, or set "
                "long_inputs=truncate."
            )
        return truncate(tokens, limit, end_id(self.vocabulary))

    def predict_tokens(
        self,
        sources: Sequence[Sequence[int]],
        *,
        numbers: Sequence[int] | None = None,
        first_number: int = 0,
        rows: int | None = None,
        progress: Progress | None = None,
    ) -> list[Prediction]:
        """Returns a prediction for each tokenized input.

        Args:
            sources: token ids including the end token.
            numbers: numbers of the inputs, for sampling and messages.
            first_number: if `numbers` is None, numbers count from this.
            rows: batch size; by default at most the number of inputs.
            progress: called for each batch.
        """
        if numbers is None:
            numbers = range(first_number, first_number + len(sources))
        if self._labels:
            return self._rank(sources, numbers, rows, progress)
        fitted = [self.fit(s, n) for s, n in zip(sources, numbers, strict=True)]
        predictions: list[Prediction | None] = [None] * len(fitted)
        for batch in self._batches([len(f.tokens) for f in fitted], rows):
            results = self._decode(batch, fitted, numbers)
            for row, i in enumerate(batch.examples):
                if i != PADDING_ROW:
                    predictions[i] = self._prediction(results, row, fitted[i].truncated)
            _tell(progress, batch)
        return [prediction for prediction in predictions if prediction is not None]

    def score_choices(
        self,
        sources: Sequence[Sequence[int]],
        choices: Sequence[Sequence[Sequence[int]]],
        *,
        numbers: Sequence[int] | None = None,
        rows: int | None = None,
        at_least: tuple[int, int] = (1, 1),
        regularizers: decoding.Regularizers = decoding.NO_REGULARIZERS,
        progress: Progress | None = None,
    ) -> list[list[TargetScore]]:
        """Scores each choice of each input; an input is encoded once for all its choices.

        All functions that score targets or rank labels call this.

        Args:
            sources: token ids including the end token.
            choices: an equal number of targets for each input, including the end token. Scored
                whole, whatever `max_length` is.
            numbers: numbers of the inputs, for messages; by default counted from 0.
            rows: inputs per batch, fewer if there are many choices; by default at most the number
                of inputs.
            at_least: choices per input, and tokens per choice, that the shapes must hold; by
                default as many as given.
            regularizers: the regularizers of the training loss.
            progress: called for each batch of inputs.

        Raises:
            UserError: as `score_tokens`.
        """
        if len(sources) != len(choices):
            raise errors.UserError(
                f"score: {len(choices)} targets for {len(sources)} inputs; give one for each, and "
                "repeat an input that several are scored for."
            )
        numbers = range(len(sources)) if numbers is None else numbers
        fitted = [self.fit(s, n) for s, n in zip(sources, numbers, strict=True)]
        tokens = [each.tokens for each in fitted]
        num_choices = max([at_least[0], *map(len, choices)])
        longest = max([at_least[1], *(len(ids) for each in choices for ids in each)])
        rows = rows or min(self.config.batch_size, decoding.bucket_size(len(fitted)))
        rows = max(1, min(rows, _CHOICES_PER_ROW * self.config.batch_size // num_choices))
        by_input: list[list[TargetScore]] = [[]] * len(fitted)
        for batch in self._batches(list(map(len, tokens)), rows):
            targets = [[] if i == PADDING_ROW else choices[i] for i in batch.examples]
            scores = decoding.score(
                self.model,
                stack(_rows(tokens, batch), batch.length),
                np.stack([stack(each, longest, rows=num_choices) for each in targets]),
                # Those of a prediction that was cut may end with 0.
                lengths=stack([list(map(len, each)) for each in targets], num_choices),
                regularizers=regularizers,
                batch_sharding=self._batch_sharding,
            )
            for row, i in enumerate(batch.examples):
                if i != PADDING_ROW:
                    by_input[i] = _target_scores(scores, row, choices[i], fitted[i].truncated)
            _tell(progress, batch)
        return by_input

    def score_tokens(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[TargetScore]:
        """Scores each target given the input at the same position.

        Args:
            sources: token ids including the end token.
            targets: likewise; scored whole, whatever `max_length` is.

        Raises:
            UserError: their numbers differ, or an input is too long and must not be truncated.
        """
        return [score for (score,) in self.score_choices(sources, [[ids] for ids in targets])]

    def _batches(self, lengths: Sequence[int], rows: int | None = None) -> list[Batch]:
        if rows is None:
            rows = min(self.config.batch_size, decoding.bucket_size(len(lengths)))
        if broken := rules.count(rows):
            raise errors.UserError(f"rows={rows!r} {broken}")
        return plan_batches(lengths, rows=rows, longest=self._lengths["inputs"])

    def _decode(
        self, batch: Batch, fitted: Sequence[Fitted], numbers: Sequence[int]
    ) -> decoding.Found:
        strategy, max_length = self.strategy, self._lengths["targets"]
        is_example = np.array([i != PADDING_ROW for i in batch.examples])
        key = None
        if isinstance(strategy, decoding.Sampling):
            at = np.array([0 if i == PADDING_ROW else numbers[i] for i in batch.examples])
            seed = seed_key(self.config.seed)
            key = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(seed, jnp.asarray(at))
        return decoding.decode(
            self.model,
            stack(_rows([f.tokens for f in fitted], batch), batch.length),
            max_length=max_length,
            max_lengths=np.where(is_example, max_length, 0),
            strategy=strategy,
            key=key,
            end_id=self.end_id,
            batch_sharding=self._batch_sharding,
        )

    def _rank(
        self,
        sources: Sequence[Sequence[int]],
        numbers: Sequence[int],
        rows: int | None,
        progress: Progress | None,
    ) -> list[Prediction]:
        assert self.format is not None
        choice_scores = self.score_choices(
            sources, [self._labels] * len(sources), numbers=numbers, rows=rows, progress=progress
        )
        return [
            _ranking(
                self.format.labels,
                self._labels,
                [score.log_prob for score in scores],
                scores[0].truncated,
            )
            for scores in choice_scores
        ]

    def _prediction(self, found: decoding.Found, row: int, cut: int) -> Prediction:
        lengths = np.asarray(found.lengths)[row]
        # There may be fewer sequences than requested.
        kept = [i for i, length in enumerate(lengths) if length]
        tokens = [tuple(np.asarray(found.tokens)[row, i, : lengths[i]].tolist()) for i in kept]
        return Prediction(
            texts=tuple(decode_text(self.target_vocabulary, ids) for ids in tokens),
            scores=tuple(float(np.asarray(found.scores)[row, i]) for i in kept),
            tokens=tuple(tokens),
            truncated=cut,
        )


def load_predictor(
    directory: epath.PathLike,
    *,
    step: int | str = "latest",
    vocabulary: str | None = None,
    ema: bool = False,
    trust: Sequence[str] = (),
    raw: bool = False,
    format: str | None = None,
    **settings: Any,
) -> Predictor:
    """Loads the predictor of `python -m convt5.infer`: a model with its vocabulary and lengths.

    Args:
        directory: a run directory, one of its steps, or an exported model.
        step: the checkpoint of a run: "latest", "best" or a number.
        vocabulary: a SentencePiece .model file, or "bytes"; None uses that of the model.
        ema: uses the average over the updates, if the run kept one.
        trust: modules that the run's settings may import, such as ["my_tasks"], or that define the
            mixing of an exported model. Modules other than convt5's are refused, because importing
            runs code.
        raw: uses inputs unchanged. By default they are formatted as in training, with the prefix
            and the fields of the task that the model was trained on.
        format: for a model trained on several tasks, the task of the inputs.
        **settings: settings of `PredictConfig`, such as strategy=BeamSearch(beam_size=4); others
            are those of the run.

    Raises:
        UserError: nothing that can be loaded, no vocabulary, an unknown task, or settings that do
            not exist or do not fit the model.
    """
    from convt5.evaluation import checkpoints, run_settings

    name = os.path.expanduser(directory)
    selected = checkpoints.select(name, str(step))
    if len(selected) != 1:
        raise errors.UserError(f"step={step} must name one checkpoint.")
    _check_known(settings)
    run = run_settings.read_for_text(str(name), vocabulary=vocabulary, trust=trust)
    features = run_settings.chosen_features(vocabulary, str(name), run, trust=trust)
    model_config = checkpoints.model_config(selected[0])
    config = dataclasses.replace(run.predict, **settings)
    chosen = run_settings.task_format(str(name), run, format, raw=raw)
    print(run_settings.describe_answers(chosen, config, raw=raw), file=sys.stderr)
    mesh = sharding.MeshConfig().build()
    return Predictor(
        checkpoints.load(selected[0], mesh, ema=ema),
        features.inputs,
        config.completed(model_config, run.trained_lengths()),
        target_vocabulary=features.targets,
        add_eos=features.add_eos,
        mesh=mesh,
        format=chosen,
        raw=raw,
    )


def _check_known(settings: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(PredictConfig)}
    errors.raise_all(
        [
            f"{setting} is no setting of PredictConfig.{errors.suggest(setting, known)}"
            for setting in settings.keys() - known
        ],
        where="load_predictor",
    )


def encode_text(vocabulary: TextVocabulary, text: str) -> list[int]:
    """Encodes a text without an end token; <extra_id_0> is the first sentinel of any vocabulary.

    Raises:
        UserError: the text has unpaired surrogates, which bytes that are not UTF-8 are read as.
    """
    text = _checked_text(text)
    ids: list[int] = []
    known = sentinels.ids_of(vocabulary) if sentinels.MARK.search(text) else ()
    # A SentencePiece model recognises its sentinels only at the start or after a space.
    for piece in _SENTINEL.split(text):
        mark = sentinels.MARK.fullmatch(piece)
        if mark and int(mark[1]) < len(known):
            ids.append(known[int(mark[1])])
        elif piece:
            ids += vocabulary.encode(piece)
    return ids


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise errors.UserError(f"the text {errors.clip(text)} is none; give a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.UserError(f"the text {text!r} is not UTF-8 ({error}); correct it.") from None
    return text


def decode_text(vocabulary: TextVocabulary, ids: Sequence[int]) -> str:
    """Decodes ids up to the end token, with sentinels as <extra_id_0>, ..."""
    end = end_id(vocabulary)
    kept = list(ids[: ids.index(end)] if end in ids else ids)
    # Rows of the model's table beyond the vocabulary have no text.
    kept = [i for i in kept if i < vocabulary.vocab_size]
    # Bytes keep every space; SentencePiece drops those at the ends of a decoded run.
    gap = "" if _reads_sentinels_as_letters(vocabulary) else " "
    return "".join(_decode_pieces(vocabulary, kept, gap)).strip(gap)


def truncate(tokens: Sequence[int], limit: int, end: int) -> Fitted:
    """Truncates to `limit` tokens; a final end token is kept, as seqio's tasks do."""
    kept = list(tokens[:limit])
    if len(tokens) > limit and tokens[-1] == end:
        kept[-1] = end
    return Fitted(kept, max(0, len(tokens) - limit))


def _decode_pieces(vocabulary: TextVocabulary, ids: Sequence[int], gap: str) -> Iterator[str]:
    run: list[int] = []
    for token, number in zip(ids, sentinels.numbers(ids, vocabulary), strict=True):
        if number is None:
            run.append(token)
            continue
        yield samples.decode(run, vocabulary)
        yield f"{gap}{sentinels.mark(number)}{gap}"
        run = []
    yield samples.decode(run, vocabulary)


def _reads_sentinels_as_letters(vocabulary: TextVocabulary) -> bool:
    """Returns whether <extra_id_0> is encoded as letters rather than as a sentinel piece."""
    return len(vocabulary.encode("<extra_id_0>")) > 2


def check_numbers(predictions: Iterable[Prediction], first_number: int = 0) -> None:
    """Raises `TrainingError` for a prediction whose scores are not numbers (NaN).

    Its texts are nothing that the model chose. In evaluation they count as wrong instead.
    """
    for number, prediction in enumerate(predictions, start=first_number + 1):
        if not prediction.scores or any(map(math.isnan, prediction.scores)):
            raise errors.TrainingError(
                f"the model's scores for input {number} are not numbers (NaN), as after training "
                "that diverged; use an earlier checkpoint, or the model that this one came from."
            )


def _check_several(**given: object) -> None:
    """Raises an error for a single input, and for inputs without an order."""
    for name, value in given.items():
        if isinstance(value, str | bytes | Mapping):
            shown = errors.clip(value)
            raise errors.UserError(
                f"{name}={shown} is a single text, but must be a list of texts; give [{shown}]."
            )
        if isinstance(value, Set) or not isinstance(value, Iterable):
            raise errors.UserError(
                f"{name}={errors.clip(value)} must be a list of texts, in their order."
            )


def _ranking(
    labels: Sequence[str], tokens: Sequence[Sequence[int]], scores: Sequence[float], cut: int
) -> Prediction:
    """Returns labels sorted by probability; ties keep the order of the task."""
    order = sorted(range(len(labels)), key=lambda i: -scores[i])
    shares = np.exp(np.asarray(scores, np.float64) - max(scores))
    shares /= shares.sum()
    return Prediction(
        texts=tuple(labels[i] for i in order),
        scores=tuple(scores[i] for i in order),
        tokens=tuple(tuple(tokens[i]) for i in order),
        truncated=cut,
        probabilities=dict(zip(labels, shares.tolist(), strict=True)),
    )


def _target_scores(
    scores: decoding.Scores, row: int, choices: Sequence[Sequence[int]], cut: int
) -> list[TargetScore]:
    parts = zip(choices, scores.log_probs[row], scores.objectives[row], strict=False)
    return [TargetScore(float(log_prob), len(ids), float(x), cut) for ids, log_prob, x in parts]


def _rows(values: Sequence[Sequence[int]], batch: Batch) -> list[Sequence[int]]:
    return [() if i == PADDING_ROW else values[i] for i in batch.examples]


def _tell(progress: Progress | None, batch: Batch) -> None:
    if progress:
        progress(sum(i != PADDING_ROW for i in batch.examples))
