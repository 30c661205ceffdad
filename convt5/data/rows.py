"""Turns examples of any length into rows of one length: padding, truncation, packing, in NumPy.

Packing numbers the examples of a row itself, so inputs and targets stay paired whatever they hold:
a feature may be empty, or contain the padding id. This module does not depend on TensorFlow.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Token sequences of different lengths, stored contiguously.

    Attributes:
        values: int32 [tokens].
        lengths: int64 [sequences], number of tokens of each.
    """

    values: np.ndarray
    lengths: np.ndarray

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Integers [sequences + 1]: the start of each sequence in `values`, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def places(self) -> np.ndarray:
        """Returns the index of each token within its sequence."""
        return np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], self.lengths)

    def take(self, numbers: np.ndarray) -> "Ragged":
        """Returns the sequences with these indices, in this order."""
        lengths = self.lengths[numbers]
        new_starts = np.cumsum(lengths) - lengths
        shifts = np.repeat(self.offsets[:-1][numbers] - new_starts, lengths)
        return Ragged(self.values[shifts + np.arange(len(shifts))], lengths)

    def part(self, first: int, last: int) -> "Ragged":
        """Returns the sequences from `first` up to, but not including, `last`."""
        begin, end = self.offsets[first], self.offsets[last]
        return Ragged(self.values[begin:end], self.lengths[first:last])

    def holding(self, value: int) -> np.ndarray:
        """Returns which sequences contain a token, as bool [sequences]."""
        before = np.concatenate([[0], np.cumsum(self.values == value)])
        return before[self.offsets[1:]] > before[self.offsets[:-1]]

    def cut(self, length: int) -> "Ragged":
        """Returns the sequences, truncated to at most `length` tokens."""
        if not len(self.lengths) or self.lengths.max() <= length:
            return self
        return Ragged(self.values[self.places() < length], np.minimum(self.lengths, length))


@dataclasses.dataclass(frozen=True)
class Examples:
    """Pairs of inputs and targets.

    Attributes:
        inputs, targets: their tokens, an equal number of sequences.
        flags: bool [examples, 3]: inputs were truncated, targets were truncated, and targets have
            text that the vocabulary lacks; see `counts.Counts`.
    """

    inputs: Ragged
    targets: Ragged
    flags: np.ndarray

    @property
    def count(self) -> int:
        return len(self.inputs.lengths)

    def digest(self) -> int:
        """Returns a positive number that other examples hardly ever have."""
        digest = 0
        for side in (self.inputs, self.targets):
            for values in (side.lengths, side.values):
                digest = zlib.crc32(values.astype("<i4").tobytes(), digest)
        return digest or 1

    def take(self, numbers: np.ndarray) -> "Examples":
        """Returns the examples with these indices, in this order."""
        return Examples(self.inputs.take(numbers), self.targets.take(numbers), self.flags[numbers])

    def part(self, first: int, last: int) -> "Examples":
        """Returns the examples from `first` up to, but not including, `last`."""
        return Examples(
            self.inputs.part(first, last), self.targets.part(first, last), self.flags[first:last]
        )


def concatenate(parts: Sequence[Examples]) -> Examples:
    """Concatenates examples, in order."""
    if len(parts) == 1:
        return parts[0]

    def one(sequences: Sequence[Ragged]) -> Ragged:
        values = [np.zeros(0, np.int32), *(s.values for s in sequences)]
        lengths = [np.zeros(0, np.int64), *(s.lengths for s in sequences)]
        return Ragged(np.concatenate(values), np.concatenate(lengths))

    flags = np.concatenate([np.zeros((0, 3), bool), *(p.flags for p in parts)])
    return Examples(one([p.inputs for p in parts]), one([p.targets for p in parts]), flags)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How examples are laid out in rows.

    Attributes:
        encoder_length: tokens per encoder row; longer inputs are truncated.
        decoder_length: tokens per decoder row; longer targets are truncated.
        pack: whether examples that fit share a row, in their order.
    """

    encoder_length: int
    decoder_length: int
    pack: bool

    def row_ends(self, input_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
        """Returns the cumulative number of examples up to each row; the last may be incomplete.

        Args:
            input_lengths, target_lengths: integers [examples], tokens before truncation.
        """
        count = len(input_lengths)
        if not self.pack:
            return np.arange(1, count + 1)
        inputs = np.minimum(input_lengths, self.encoder_length).tolist()
        targets = np.minimum(target_lengths, self.decoder_length).tolist()
        ends: list[int] = []
        first = encoder_tokens = decoder_tokens = 0
        for number, (source, target) in enumerate(zip(inputs, targets, strict=True)):
            encoder_tokens += source
            decoder_tokens += target
            is_full = (
                encoder_tokens > self.encoder_length
                or decoder_tokens > self.decoder_length
                or number - first >= self.encoder_length  # Bounds examples without tokens.
            )
            if is_full:
                ends.append(number)
                first, encoder_tokens, decoder_tokens = number, source, target
        return np.array([*ends, *([count] if count else [])], np.int64)

    def batch(self, examples: Examples, row_ends: np.ndarray, num_rows: int) -> Batch:
        """Returns int32 arrays [num_rows, length] with the keys of seqio's EncDecFeatureConverter.

        Args:
            examples: the examples of all rows.
            row_ends: the result of `row_ends`; if shorter than `num_rows`, empty rows follow.
            num_rows: rows of the batch.
        """
        per_row = np.zeros(num_rows, np.int64)
        per_row[: len(row_ends)] = np.diff(row_ends, prepend=0)
        encoder = _side(examples.inputs.cut(self.encoder_length), per_row, self.encoder_length)
        decoder = _side(examples.targets.cut(self.decoder_length), per_row, self.decoder_length)
        read = np.zeros_like(decoder.tokens)
        read[:, 1:] = decoder.tokens[:, :-1]
        if self.pack:
            read[decoder.positions == 0] = 0  # Each example starts with the padding id.
        batch = {
            "encoder_input_tokens": encoder.tokens,
            "decoder_target_tokens": decoder.tokens,
            "decoder_input_tokens": read,
            "decoder_loss_weights": (decoder.tokens != 0).astype(np.int32),
        }
        if self.pack:
            for name, side in (("encoder", encoder), ("decoder", decoder)):
                batch[f"{name}_segment_ids"] = side.segment_ids
                batch[f"{name}_positions"] = side.positions
        return batch


@dataclasses.dataclass(frozen=True)
class _Side:
    """Arrays [rows, length] of encoder or decoder, all 0 where there is no token."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def _side(sequences: Ragged, per_row: np.ndarray, length: int) -> _Side:
    """Concatenates the next `per_row` sequences in each row."""
    row_of = np.repeat(np.arange(len(per_row)), per_row)
    tokens_per_row = np.bincount(row_of, sequences.lengths, len(per_row)).astype(np.int64)
    is_token = np.arange(length) < tokens_per_row[:, None]

    def filled(values: np.ndarray) -> np.ndarray:
        array = np.zeros(is_token.shape, np.int32)
        array[is_token] = values
        return array

    numbers = np.arange(len(row_of)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    return _Side(
        tokens=filled(sequences.values),
        segment_ids=filled(np.repeat(numbers + 1, sequences.lengths)),
        positions=filled(sequences.places()),
    )


def checksums(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the CRC-32 of each row over all features, [rows, length], by name; uint32."""
    parts = [np.ascontiguousarray(rows[name]).view(np.uint8) for name in sorted(rows)]
    return np.array([zlib.crc32(row) for row in np.concatenate(parts, axis=1)], "<u4")
