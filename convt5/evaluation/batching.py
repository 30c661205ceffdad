"""Groups examples into batches of similar length, with few different shapes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from convt5 import errors
from convt5.generation.decoding import SMALLEST_LENGTH, bucket_size

PADDING_ROW = -1


class Batch(NamedTuple):
    """Rows that are computed together.

    Attributes:
        examples: index of the example in each row; PADDING_ROW for rows that fill the last batch.
        length: tokens per row, one of few values.
    """

    examples: tuple[int, ...]
    length: int


def plan_batches(lengths: Sequence[int], *, rows: int, longest: int) -> list[Batch]:
    """Assigns examples to batches, longest first, so that running out of memory shows at once.

    Args:
        lengths: tokens of each example.
        rows: rows per batch; the last one is filled with padding rows.
        longest: upper bound of the lengths. It ends the series of `decoding.bucket_size`, which
            bounds the number of shapes by twice the logarithm of `longest`.
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
    """Returns the padded length of a row of `length` tokens."""
    return max(length, min(bucket_size(length, smallest=SMALLEST_LENGTH), longest))


def stack(values: Sequence[Sequence[int]], length: int, *, rows: int | None = None) -> np.ndarray:
    """Returns token ids as [rows, length], padded with 0; by default one row per value."""
    # Of 64 bits, so that ids of no vocabulary stay what they are, and are refused.
    array = np.zeros((len(values) if rows is None else rows, length), np.int64)
    for i, row in enumerate(values):
        ids = np.asarray(row)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise errors.UserError(
                f"token ids {errors.clip(row)} are {ids.dtype}, but must be integers."
            )
        array[i, : len(row)] = ids
    return array
