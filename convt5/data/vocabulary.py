"""The command `convt5 vocabulary`: trains a SentencePiece vocabulary on text.

The model follows T5: id 0 is padding, 1 the end token, 2 unknown, and there is no start token.
Letters outside all pieces are encoded as bytes. Sentinels are not pieces of the model: convt5
appends them after its last id.
"""

import argparse
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from convt5 import errors
from convt5.configuration import command_line
from convt5.runtime import atomic_files
from convt5.runtime.bars import Bar

_HELD_OUT = 100
"""One of this many lines is held out for measuring."""
_MOST_MEASURED = 20_000
_LINE_BYTES = 4_000
"""Longest line; SentencePiece ignores longer ones, so they are split at spaces."""
_BYTE_PIECES = 256
_FEWEST_LINES = 101
"""Fewest lines that SentencePiece draws from a text."""
_LARGEST = 2**31 - 1
_SETTINGS = {
    "vocab_size": "--size",
    "character_coverage with --character_coverage option": "--coverage",
}
"""The flags for the settings of SentencePiece that its messages name."""

COMMAND = command_line.Command(
    name="vocabulary",
    summary="Trains a SentencePiece vocabulary with T5's conventions on your text, and reports "
    "its coverage of held-out text.",
    needs_gin_file=False,
    reads_gin=False,
    examples=[
        (
            "train 8,000 pieces for a small model",
            "--text='corpus/*.txt.gz' --size=8000 --output=corpus/spm.model",
        ),
        (
            "train on several sources, with text of many scripts",
            "--text=corpus/books --text=corpus/web.jsonl --coverage=0.9995 --output=spm.model",
        ),
        (
            "train a vocabulary, then pre-train with it",
            "--text='corpus/*.txt.gz' --output=corpus/spm.model && python -m convt5.train "
            "--gin_file=gin/runs/pretrain_text.gin --gin.TEXT='corpus/*.txt.gz' "
            "--gin.VOCABULARY=corpus/spm.model --gin.RUN_DIR=runs/corpus",
        ),
    ],
    flags=[
        command_line.Flag(
            "text",
            "a file, folder or glob of plain text or JSON lines, also .gz, .xz, .bz2; may be "
            "repeated.",
            {"action": "append", "required": True},
        ),
        command_line.Flag("output", "the .model file to write.", {"required": True}),
        command_line.Flag(
            "size",
            "number of pieces, byte pieces included (default: 32,000).",
            {"type": int, "default": 32_000},
        ),
        command_line.Flag(
            "lines",
            "most lines to train on, drawn from all (default: 1,000,000).",
            {"type": int, "default": 1_000_000},
        ),
        command_line.Flag(
            "coverage",
            "share of the text's characters that get a piece of their own (default: 1); the "
            "others become bytes. 0.9995 suits scripts with thousands of characters.",
            {"type": float, "default": 1.0},
        ),
        command_line.Flag(
            "invalid_utf8",
            "lines with invalid UTF-8: refuse (the default), replace or skip.",
            {"default": "refuse"},
        ),
    ],
)


def main(argv: Sequence[str]) -> int:
    flags = command_line.parse(COMMAND, argv).flags
    output = command_line.path(flags.output)
    _check(flags, output)
    from convt5.tasks import text_files

    files = text_files.TextFiles(path=flags.text, invalid_utf8=flags.invalid_utf8)
    _check_writable(output)
    lines = _Lines(_cut(files.documents()))
    model = _train(lines, flags)
    with atomic_files.replacing(output) as partial:
        partial.write_bytes(model)
    measured = lines.held_out or lines.first
    print(describe(measure(model, measured), is_held_out=bool(lines.held_out)))
    print(f"use it: --gin.VOCABULARY={flags.output}")
    return 0


def _check(flags: argparse.Namespace, output: pathlib.Path) -> None:
    faults = []
    if flags.size <= _BYTE_PIECES + 3:
        faults.append(
            f"size={flags.size} must be above {_BYTE_PIECES + 3}: that many are byte pieces and "
            "special tokens."
        )
    if max(flags.size, flags.lines) > _LARGEST:
        faults.append(f"size={flags.size} and lines={flags.lines} must be at most {_LARGEST:,}.")
    if flags.lines < _FEWEST_LINES:
        faults.append(
            f"lines={flags.lines} must be at least {_FEWEST_LINES}, as SentencePiece requires."
        )
    if not 0.9 <= flags.coverage <= 1:
        faults.append(f"coverage={flags.coverage} must be from 0.9 to 1.")
    if output.suffix != ".model":
        faults.append(f"output={flags.output!r} must end in .model, as SentencePiece models do.")
    if os.path.lexists(output):
        faults.append(
            f"output={flags.output!r} exists, and models trained with it depend on its ids. "
            "Choose another name, or remove it."
        )
    errors.raise_all(faults, where="vocabulary")


def _check_writable(output: pathlib.Path) -> None:
    """Makes the folder of the output; raises `UserError` if nothing can be written there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise errors.of_full_disk(error) or errors.UserError(
            f"output={str(output)!r} cannot be written ({error.strerror}); name a file in a folder "
            "that can."
        ) from error


class _Lines:
    """The lines to train on, with one in `_HELD_OUT` held out.

    Args:
        lines: all lines of the text.
    """

    def __init__(self, lines: Iterable[str]):
        self._lines = lines
        self.first: list[str] = []
        self.held_out: list[str] = []
        self.error: errors.UserError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._training_lines()
        except errors.UserError as error:
            self.error = error
            raise
        print("training", file=sys.stderr, flush=True)

    def _training_lines(self) -> Iterator[str]:
        with Bar(sys.stderr, label="reading", unit="line") as progress:
            for number, line in enumerate(self._lines):
                progress.update()
                if number < _HELD_OUT:
                    self.first.append(line)
                if number % _HELD_OUT == _HELD_OUT - 1 and len(self.held_out) < _MOST_MEASURED:
                    self.held_out.append(line)
                else:
                    yield line


def _cut(documents: Iterable[bytes]) -> Iterator[str]:
    from convt5.tasks import sources

    for document in documents:
        for line in document.split(b"\n"):
            for piece in sources.pieces(line, _LINE_BYTES):
                if piece.strip():
                    yield piece.decode()


def _train(lines: _Lines, flags: argparse.Namespace) -> bytes:
    """Returns the trained model as the contents of its file."""
    import sentencepiece

    sentencepiece.set_random_generator_seed(0)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=flags.size,
            model_type="unigram",
            byte_fallback=True,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            character_coverage=flags.coverage,
            input_sentence_size=flags.lines,
            shuffle_input_sentence=True,
            max_sentence_length=2 * _LINE_BYTES,
            minloglevel=2,
        )
    except RuntimeError as error:
        if lines.error is not None:  # An error of reading the text, which SentencePiece wraps.
            raise lines.error from None
        reason = str(error).rpartition("] ")[2].strip().rstrip(".") or "there is no text"
        for setting, flag in _SETTINGS.items():
            reason = reason.replace(setting, flag)
        raise errors.UserError(
            f"size={flags.size}: SentencePiece cannot train a vocabulary on this text: {reason}."
        ) from error
    return model.getvalue()


class Measured(NamedTuple):
    """How a vocabulary encodes text.

    Attributes:
        pieces: number of pieces, without sentinels.
        lines: number of measured lines.
        words: number of words separated by spaces.
        tokens: number of token ids of the text.
        num_bytes: bytes of the text in UTF-8, without line ends.
        byte_tokens: number of token ids that encode a single byte, for letters outside all pieces.
        example: the pieces of the first words.
    """

    pieces: int
    lines: int
    words: int
    tokens: int
    num_bytes: int
    byte_tokens: int
    example: str


def measure(model: bytes, lines: Sequence[str]) -> Measured:
    """Measures how the vocabulary in a model file encodes lines."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    encoded = [processor.encode(line) for line in lines]
    return Measured(
        pieces=processor.get_piece_size(),
        lines=len(lines),
        words=sum(len(line.split()) for line in lines),
        tokens=sum(map(len, encoded)),
        num_bytes=sum(len(line.encode()) for line in lines),
        byte_tokens=sum(processor.is_byte(token) for ids in encoded for token in ids),
        example=" ".join(processor.id_to_piece(encoded[0][:16])) if encoded else "",
    )


def describe(measured: Measured, *, is_held_out: bool) -> str:
    """Returns the report that the command prints."""
    of = "held out of training" if is_held_out else "it was trained on"
    words, tokens = max(measured.words, 1), max(measured.tokens, 1)
    share = 100 * (1 - measured.byte_tokens / max(measured.num_bytes, 1))
    return "\n".join(
        [
            f"{measured.pieces:,} pieces; on {measured.lines:,} lines {of}:",
            f"  {measured.tokens / words:.2f} tokens a word, {measured.num_bytes / tokens:.2f} "
            "bytes a token",
            f"  {share:.2f} % of the text is in pieces, the rest is written as bytes",
            f"  {errors.printable(measured.example)}",
        ]
    )


if __name__ == "__main__":
    command_line.run(main)
