"""Predictions for a stream of inputs in order, chunk by chunk, and for a dialogue."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from convt5 import errors
from convt5.evaluation.inputs import Item, chunks
from convt5.evaluation.predictor import Prediction, Predictor, Progress, check_numbers

Record = dict[str, Any]


def predictions(
    predictor: Predictor,
    items: Iterator[Item],
    *,
    chunk_size: int,
    done: Iterable[Record] = (),
    progress: Progress | None = None,
) -> Iterator[list[Record]]:
    """Yields the records of each chunk of inputs, except records that exist already.

    The inputs of a chunk are batched by length. A partly finished chunk is computed whole, so that
    a resumed command adds exactly what it would have written without interruption.

    Args:
        predictor: its batch size is used for all batches of a stream.
        items: all inputs, from the first.
        chunk_size: number of inputs computed before any of them is yielded.
        done: the first records, from an earlier run; checked to belong to the same inputs.
        progress: called for each record.

    Raises:
        UserError: an earlier record belongs to another input, or an input is invalid.
        TrainingError: as `check_numbers`.
    """
    earlier = iter(done)
    rows = predictor.config.batch_size
    first = 0
    for chunk in chunks(items, chunk_size):
        num_there = check_done(chunk, itertools.islice(earlier, len(chunk)), first)
        if num_there < len(chunk):
            # A short stream needs no full batch.
            is_all = first == 0 and len(chunk) < rows
            predicted = predictor.predict_tokens(
                [item.tokens or predictor.encode(item.text) for item in chunk],
                first_number=first,
                rows=None if is_all else rows,
            )
            check_numbers(predicted, first)
            records = [
                record(first + i, item, prediction)
                for i, (item, prediction) in enumerate(zip(chunk, predicted, strict=True))
            ]
            yield records[num_there:]
            if progress:
                progress(len(chunk) - num_there)
        first += len(chunk)
    if next(earlier, None) is not None:
        raise errors.UserError(
            f"the output has more lines than there are inputs ({first}); choose another output, "
            "or remove the file."
        )


def record(index: int, item: Item, prediction: Prediction) -> Record:
    """Returns the record of one prediction, a line of output."""
    target = {} if item.target is None else {"target": item.target}
    ranked = {}
    if prediction.probabilities is not None:
        ranked = {"label": prediction.label, "probabilities": dict(prediction.probabilities)}
    return {
        "index": index,
        "input": item.text,
        **target,
        **ranked,
        "predictions": list(prediction.texts),
        "scores": list(prediction.scores),
        "truncated": prediction.truncated,
    }


def converse(
    predictor: Predictor,
    ask: Callable[..., str],
    out: TextIO,
    *,
    fields: Sequence[str] = (),
    first_number: int = 0,
) -> None:
    """Answers each input that `ask` returns, until it raises `EOFError`.

    Args:
        predictor: used one input at a time.
        ask: returns a line; called with the name of each of the `fields`.
        out: receives predictions, with scores if there are several, and labels with their
            probabilities.
        fields: fields of a task that has several; `ask` is called for each.
        first_number: number of the first input; sampling answers a repeated input differently.
    """
    for number in itertools.count(first_number):
        try:
            answer = {field: ask(field) for field in fields} if fields else ask()
        except EOFError:
            return
        if not "".join(answer.values() if isinstance(answer, dict) else answer).strip():
            continue
        try:
            (prediction,) = predictor.predict([answer], first_number=number)
        except errors.UserError as error:
            print(f"error: {error}", file=out, flush=True)
            continue
        if prediction.truncated:
            print(f"({prediction.truncated} input tokens were truncated)", file=out)
        for line in _answers(prediction):
            print(line, file=out, flush=True)


def _answers(prediction: Prediction) -> list[str]:
    """Returns the lines to show: the most likely label before the others, or the results."""
    if prediction.probabilities is not None:
        shown = [f"{label} {prediction.probabilities[label]:.3f}" for label in prediction.texts]
        return [f"{shown[0]}  ({', '.join(errors.abbreviate(shown[1:]))})"]
    if len(prediction.texts) == 1:
        return list(prediction.texts)
    pairs = zip(prediction.texts, prediction.scores, strict=True)
    return [f"{score:9.4f}  {result}" for result, score in pairs]


def check_done(items: Iterable[Item], earlier: Iterable[Record], first: int = 0) -> int:
    """Returns how many inputs have records already; `first` is the number of the first input.

    Raises:
        UserError: a record belongs to another input.
    """
    count = 0
    for count, (item, record) in enumerate(zip(items, earlier, strict=False), start=1):
        if record.get("input") != item.text:
            raise errors.UserError(
                f"line {first + count} of the output was made from {record.get('input')!r}, but "
                f"input {first + count} is {item.text!r}; the inputs have changed: choose another "
                "output, or remove the file."
            )
    return count
