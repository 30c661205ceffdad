"""Which examples are computed together: batches of similar length, in few shapes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from convt5.generation.decoding import SMALLEST_LENGTH, bucket_size

PADDING_ROW = -1


class Batch(NamedTuple):
    """Rows that are computed together.

    Attributes:
        examples: which example each row holds; PADDING_ROW in rows that fill the last batch.
        length: tokens of a row; one of few values.
    """

    examples: tuple[int, ...]
    length: int


def plan_batches(lengths: Sequence[int], *, rows: int, longest: int) -> list[Batch]:
    """Deals examples to batches, the longest first, so that memory runs out early if it does.

    Args:
        lengths: tokens of each example.
        rows: of each batch; the last one is filled with padding rows.
        longest: no length is above it; it ends the series of `decoding.bucket_size`, which bounds
            the number of shapes by twice the logarithm of `longest`.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    batches = [order[start : start + rows] for start in range(0, len(order), rows)]
    return [
        Batch(
            examples=(*batch, *[PADDING_ROW] * (rows - len(batch))),
            length=length_bucket(lengths[batch[0]], longest),
        )
        for batch in batches
    ]


def length_bucket(length: int, longest: int) -> int:
    """Returns the number of tokens that a row of `length` tokens is padded to."""
    return max(length, min(bucket_size(length, smallest=SMALLEST_LENGTH), longest))


def stacked(values: Sequence[Sequence[int]], length: int, *, rows: int | None = None) -> np.ndarray:
    """Returns token ids as [rows, length], 0 where padded; by default as many rows as values."""
    array = np.zeros((len(values) if rows is None else rows, length), np.int32)
    for i, row in enumerate(values):
        array[i, : len(row)] = row
    return array
