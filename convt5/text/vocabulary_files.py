"""Saves the vocabulary with a model, so that its ids have a meaning without its training data.

A run directory, or a model exported from it, has a folder:

vocabulary/about.json     the kind of both vocabularies, and the lengths of rows
vocabulary/inputs.model   the SentencePiece model used in training; absent for bytes
vocabulary/targets.model  present if targets have another vocabulary

A Hugging Face folder has its vocabulary in spiece.model, or says in tokenizer_config.json that it
consists of bytes, as for byte-level T5s.
"""

import contextlib
import contextvars
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from absl import logging
from etils import epath

from convt5 import errors
from convt5.runtime import atomic_files, folders, foreign_files, quiet_imports
from convt5.text import sentinels, tokenizer_files

FOLDER = "vocabulary"
HUGGING_FACE_FILE = "spiece.model"
"""Vocabulary file of a T5 model in transformers; it seldom includes the sentinels."""

_TOKENIZER_FILE = "tokenizer_config.json"
_BYTE_TOKENIZER = "ByT5Tokenizer"

MOST_TOKENS = 2**24
"""Most tokens of a row, or sentinels, that a file may state, as memory is allocated for them."""

BYTES = "bytes"
"""Name of the vocabulary of UTF-8 bytes in settings and flags; it needs no file."""

Kind = Literal["sentencepiece", "characters"]

_run: contextvars.ContextVar[str | None] = contextvars.ContextVar("run", default=None)

_ABOUT_FILE = "about.json"
_LENGTHS = ("encoder_length", "decoder_length")
SENTINEL_PIECE = re.compile(r"▁?<?extra_id_\d+>?")
"""Sentinel pieces of a SentencePiece model that has its own, at its end."""


class KeptVocabulary(NamedTuple):
    """A vocabulary as plain values.

    Attributes:
        kind: kind of the vocabulary.
        num_sentinels: number of ids for sentinels: its last ones, or pieces of the model. Bytes
            with 0 have those of published byte-level T5s, see `sentinels`.
        model: contents of the SentencePiece model file.
    """

    kind: Kind
    num_sentinels: int
    model: bytes = b""

    @property
    def fingerprint(self) -> str:
        """A value that is equal only if ids mean the same texts."""
        content = hashlib.sha256(self.model).hexdigest()[:32]
        return f"{self.kind} {content}, {self.num_sentinels} sentinels"

    @property
    def end_id(self) -> int:
        """The id that ends a text."""
        return 1 if self.kind == "characters" else processor_of(self.model).eos_id()

    @property
    def first_sentinel(self) -> int | None:
        """The id of <extra_id_0>, which depends on the number of sentinels; None without any."""
        last = sentinels.LAST_BYTE
        if self.kind == "sentencepiece":
            processor = processor_of(self.model)
            own, last = sentinels.own_pieces(processor), processor.GetPieceSize() - 1
            if own or not self.num_sentinels:
                return own[0] if own else None
        return last + self.num_sentinels

    def agrees_with(self, other: "KeptVocabulary", *, in_sentinels: bool = False) -> bool:
        """Returns whether ids mean the same text; <extra_id_0> counts only with `in_sentinels`."""
        if self == other:
            return True
        agrees = self.kind == other.kind and same_pieces(self.model, other.model)
        return agrees and (not in_sentinels or self.first_sentinel == other.first_sentinel)


class KeptText(NamedTuple):
    """How a model reads and writes text.

    Attributes:
        inputs, targets: the vocabularies, often the same.
        add_eos: whether inputs end with the end token.
        encoder_length, decoder_length: tokens per row, if known.
        holds_sentinels: whether rows of data are known to hold sentinels; not saved.
    """

    inputs: KeptVocabulary
    targets: KeptVocabulary
    add_eos: bool = True
    encoder_length: int | None = None
    decoder_length: int | None = None
    holds_sentinels: bool = False

    @property
    def fingerprints(self) -> list[str]:
        """What identifies the vocabularies of inputs and targets."""
        return [self.inputs.fingerprint, self.targets.fingerprint]


@contextlib.contextmanager
def of_run(run_dir: epath.PathLike | None) -> Iterator[None]:
    """Context in which the run's saved vocabulary replaces one whose file is gone."""
    token = _run.set(None if run_dir is None else os.fspath(run_dir))
    try:
        yield
    finally:
        _run.reset(token)


def kept_by_run() -> Any:
    """Returns the saved vocabulary of the run in `of_run`; None if it has none, or two."""
    run_dir = _run.get()
    if run_dir is None or not (epath.Path(run_dir) / FOLDER / _ABOUT_FILE).exists():
        return None
    features = load_features(run_dir)
    return features.inputs if features is not None and features.inputs is features.targets else None


class TextFeatures(NamedTuple):
    """How text becomes ids: vocabularies as of seqio, and whether the end token is added."""

    inputs: Any
    targets: Any
    add_eos: bool = True


def check_same_ids(
    text: KeptText | None,
    model: epath.PathLike,
    *,
    where: str,
    remedy: str,
    halves: Sequence[str] = ("inputs", "targets"),
) -> None:
    """Raises `UserError` if a model would read and write ids that mean other text to it.

    Warns if sentinels of the data have other ids.

    Args:
        text: the text of each id from now on; None if unknown.
        model: where the model lies, with the vocabularies that it was trained with, if known.
        where: begins the message.
        remedy: ends the message, after "give the run the vocabulary of the checkpoint, or".
        halves: whose ids are compared.
    """
    before = load(model) if text else None
    if text is None or before is None:
        return
    for name in halves:
        own, other = getattr(text, name), getattr(before, name)
        if not own.agrees_with(other):
            raise errors.UserError(
                f"{where}: {model} was trained with another vocabulary of {name} "
                f"({other.fingerprint}) than this run ({own.fingerprint}), so ids would stand for "
                f"other text; give the run the vocabulary of the checkpoint, or {remedy}."
            )
        if not own.agrees_with(other, in_sentinels=text.holds_sentinels):
            logging.warning(
                "%s: %s knows the sentinel <extra_id_0> of its %s as id %s, but it is %s in this "
                "run, so its sentinels are new to the model; num_sentinels=%d makes them the same",
                *(where, model, name, other.first_sentinel, own.first_sentinel),
                other.num_sentinels,
            )


def replacement(source: str, given: KeptVocabulary | None, model: epath.PathLike) -> str | None:
    """Returns a note that a named vocabulary replaces another one of a model; None if it does not.

    Args:
        source: the name of the vocabulary, for the note.
        given: the vocabulary; None if it cannot be compared.
        model: where the model lies.
    """
    try:
        kept = load(model) if given else None
    except errors.UserError:  # It is damaged: the user may name another for this reason.
        return None
    if given is None or kept is None:
        return None
    both = kept.inputs, kept.targets
    others = [v for v in both if not given.agrees_with(v, in_sentinels=True)]
    if not others:
        return None
    return (
        f"vocabulary={source} ({given.fingerprint}) replaces the vocabulary of {model} "
        f"({others[0].fingerprint}): ids stand for other text than it states."
    )


def check_size(vocabulary: Any, vocab_size: int) -> None:
    """Raises `UserError` if a seqio vocabulary has ids for which a model has no embedding."""
    if vocabulary.vocab_size > vocab_size:
        raise errors.UserError(
            f"the vocabulary has {vocabulary.vocab_size} ids, sentinels included, but the model's "
            f"vocab_size={vocab_size}; use the vocabulary that the model was trained with."
        )


def of(vocabulary: Any) -> KeptVocabulary | None:
    """Returns a seqio vocabulary as plain values; None if a file could not restore it."""
    with quiet_imports.without_tensorflow_chatter():
        import seqio
        import tensorflow as tf

        from convt5.text import seqio_vocabularies

    if isinstance(vocabulary, seqio.ByteVocabulary):
        num_sentinels = int(vocabulary.extra_ids or 0)
        same = seqio_vocabularies.byte_level(num_sentinels) == vocabulary
        return KeptVocabulary("characters", num_sentinels) if same else None
    if not isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return None
    file, own_ids = vocabulary.sentencepiece_model_file, sentinels.ids_of(vocabulary)
    num_sentinels = len(own_ids)
    try:
        again = seqio_vocabularies.from_file(file, num_sentinels)
    except errors.UserError:
        return None
    if again.sp_model != vocabulary.sp_model or sentinels.ids_of(again) != own_ids:
        return None  # It has options that are not saved.
    with tf.io.gfile.GFile(file, "rb") as opened:
        return KeptVocabulary("sentencepiece", num_sentinels, opened.read())


def of_features(features: Mapping[str, Any]) -> KeptText | None:
    """Returns the vocabularies of a seqio task; None if no vocabulary file can express one."""
    inputs, targets = (of(features[name].vocabulary) for name in ("inputs", "targets"))
    if inputs is None or targets is None:
        return None
    return KeptText(inputs, targets, features["inputs"].add_eos)


def same_pieces(one: bytes, other: bytes) -> bool:
    """Returns whether two SentencePiece models have the same pieces, apart from sentinels."""
    try:
        return one == other or _pieces(one) == _pieces(other)
    except RuntimeError:  # A model is damaged.
        return False


def of_data(data: Any) -> KeptText | None:
    """Returns the vocabularies of the rows of a `data.DataConfig`, a cache, or a task.

    Returns None for data that is not text, or whose vocabulary is unknown.
    """
    describe = getattr(data, "kept_text", None)
    return describe() if describe else None


def write(folder: epath.PathLike, text: KeptText) -> None:
    """Writes the vocabularies into `folder`, which is created if needed."""
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {name: getattr(text, name) for name in ("add_eos", *_LENGTHS)}
    for name in _names(text):
        kept = getattr(text, name)
        about[name] = {kept.kind: kept.num_sentinels}
        if kept.kind == "sentencepiece":
            with atomic_files.replacing(folder / f"{name}.model") as partial:
                partial.write_bytes(kept.model)
    with atomic_files.replacing(folder / _ABOUT_FILE) as partial:
        partial.write_text(json.dumps(about, indent=2) + "\n")


def load(model: epath.PathLike) -> KeptText | None:
    """Returns what is saved with a run, one of its steps or an export; None if nothing is.

    Raises:
        UserError: files are missing or damaged.
    """
    folder = _folder(model)
    if folder is not None:
        return _read(folder)
    exported = _of_hugging_face(model)
    if exported is None:
        return None
    if exported.name != HUGGING_FACE_FILE:
        kept = KeptVocabulary("characters", _num_byte_sentinels(exported))
    else:
        try:
            pieces = read_model(exported)
        except (OSError, ValueError) as error:
            remedy = (
                "put the file back, or remove it and name the vocabulary (--vocabulary=FILE.model)."
            )
            raise foreign_files.unreadable(exported, error, remedy) from None
        kept = KeptVocabulary("sentencepiece", _num_sentinels(exported, pieces), pieces)
    return KeptText(kept, kept)


def added_tokens(model: epath.PathLike) -> list[str]:
    """Returns the tokens that a transformers folder adds to its SentencePiece model and sentinels.

    Their ids are not read: in texts, they are letters.
    """
    file = _of_hugging_face(model)
    if file is None or file.name != HUGGING_FACE_FILE:
        return []
    settings = foreign_files.find_json(file.parent / _TOKENIZER_FILE) or {}
    by_id = settings.get("added_tokens_decoder")
    described = by_id.values() if isinstance(by_id, dict) else []
    tokens = [about.get("content") for about in described if isinstance(about, dict)]
    tokens += foreign_files.find_json(file.parent / "added_tokens.json") or {}
    try:
        processor = processor_of(read_model(file))
    except (OSError, ValueError):  # It is damaged, which is told where it is read.
        return []
    unread = [t for t in tokens if isinstance(t, str) and not sentinels.MARK.fullmatch(t)]
    return [t for t in dict.fromkeys(unread) if processor.IdToPiece(processor.PieceToId(t)) != t]


def write_for_hugging_face(folder: epath.PathLike, text: KeptText) -> bool:
    """Writes the vocabulary in the format of transformers; returns whether there is such a one.

    Writes only vocabularies for which transformers has a tokenizer with the same ids, the same for
    inputs and targets: bytes, and what `tokenizer_files` describes. These tokenizers end each text
    with the end token, so it writes none where inputs do not end so. Of published byte-level T5s,
    which have no sentinel ids of their own, it writes no sentinels.

    Args:
        folder: an existing folder.
        text: the text of ids.
    """
    folder, kept = epath.Path(folder), text.inputs
    if text.targets != kept or not text.add_eos:
        return False
    about: dict[str, Any] | None = {"tokenizer_class": _BYTE_TOKENIZER, "extra_ids": 125}
    if kept.kind == "sentencepiece":
        about = _write_pieces(folder, kept)
    elif kept.num_sentinels:
        about |= {"extra_ids": 0, "added_tokens_decoder": _byte_sentinels(kept.num_sentinels)}
    if about is None:
        return False
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / _TOKENIZER_FILE).write_text(json.dumps(special | about, indent=2) + "\n")
    return True


def _write_pieces(folder: epath.Path, kept: KeptVocabulary) -> dict[str, Any] | None:
    """Writes a SentencePiece vocabulary, and returns what tokenizer_config.json says of it."""
    processor = processor_of(kept.model)
    own, size = sentinels.own_pieces(processor), processor.GetPieceSize()
    marks = own or range(size + kept.num_sentinels - 1, size - 1, -1)
    spelled = {token: sentinels.mark(number) for number, token in enumerate(marks)}
    contents = tokenizer_files.describe(kept.model, spelled)
    if contents is None:
        return None
    (folder / HUGGING_FACE_FILE).write_bytes(kept.model)
    (folder / "tokenizer.json").write_text(json.dumps(contents, indent=1) + "\n")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_ids": 0 if own else kept.num_sentinels,
        "pad_token": processor.IdToPiece(0),
        "eos_token": processor.IdToPiece(processor.eos_id()),
        "unk_token": processor.IdToPiece(processor.unk_id()),
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(spelled.values()),
    }


def _byte_sentinels(count: int) -> dict[str, dict[str, Any]]:
    """Returns the tokens beside bytes by id, as transformers keeps them."""
    first, last = ["<pad>", "</s>", "<unk>"], sentinels.LAST_BYTE + count
    tokens = dict(enumerate(first)) | {last - i: sentinels.mark(i) for i in range(count)}
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {str(i): {"content": tokens[i], **plain, "special": True} for i in sorted(tokens)}


def _num_byte_sentinels(file: epath.Path) -> int:
    """Returns how many sentinels `write_for_hugging_face` has put behind the bytes."""
    settings = foreign_files.find_json(file) or {}
    tokens = settings.get("added_tokens_decoder")
    if settings.get("extra_ids") != 0 or not isinstance(tokens, dict):
        return 0
    count = sum(id_.isascii() and id_.isdigit() and len(id_) < 9 for id_ in tokens) - 3
    return count if 0 < count <= MOST_TOKENS and tokens == _byte_sentinels(count) else 0


def load_features(model: epath.PathLike) -> TextFeatures | None:
    """Returns the seqio vocabularies of a model; None if `load` returns None.

    Raises:
        UserError: files are missing or damaged.
    """
    folder, text = _folder(model), load(model)
    if text is None:
        return None
    if folder is None:
        return TextFeatures(*[build_vocabulary(text.inputs, _of_hugging_face(model))] * 2)
    inputs = targets = build_vocabulary(text.inputs, folder / "inputs.model")
    if "targets" in _names(text):
        targets = build_vocabulary(text.targets, folder / "targets.model")
    return TextFeatures(inputs, targets, text.add_eos)


def build_vocabulary(kept: KeptVocabulary, file: epath.PathLike | None) -> Any:
    """Returns the seqio vocabulary whose SentencePiece model is `file`.

    Raises:
        UserError: the file is missing or unreadable.
    """
    with quiet_imports.without_tensorflow_chatter():
        from convt5.text import seqio_vocabularies

    if kept.kind == "characters":
        return seqio_vocabularies.byte_level(kept.num_sentinels)
    return seqio_vocabularies.from_file(str(file), kept.num_sentinels)


def _folder(model: epath.PathLike) -> epath.Path | None:
    """Returns the folder of a model's saved vocabulary, or None."""
    path = epath.Path(os.path.expanduser(model))
    if not (path / FOLDER / _ABOUT_FILE).exists() and _of_hugging_face(path):
        return None  # The folder's own vocabulary precedes that of the run around it.
    run = folders.run_folder(model, f"{FOLDER}/{_ABOUT_FILE}")
    return None if run is None else run / FOLDER


def _of_hugging_face(model: epath.PathLike) -> epath.Path | None:
    """Returns the file that defines the vocabulary of a transformers folder, or None."""
    folder = epath.Path(os.path.expanduser(model))
    if (folder / HUGGING_FACE_FILE).exists():
        return folder / HUGGING_FACE_FILE
    for name in (_TOKENIZER_FILE, "config.json"):
        settings = foreign_files.find_json(folder / name) or {}
        if settings.get("tokenizer_class") == _BYTE_TOKENIZER:
            return folder / name
    return None


def _num_sentinels(file: epath.Path, model: bytes) -> int:
    """Returns how many sentinels a SentencePiece model of transformers has, or is given there."""
    own = len(sentinels.own_pieces(processor_of(model)))
    given = (foreign_files.find_json(file.parent / _TOKENIZER_FILE) or {}).get("extra_ids")
    if type(given) is not int or not 0 <= given <= MOST_TOKENS:
        given = sentinels.T5_SENTINELS
    return own or given


def _read(folder: epath.Path) -> KeptText:
    try:
        content = foreign_files.read_bytes(folder / _ABOUT_FILE, foreign_files.MOST_JSON_BYTES)
        about = foreign_files.parse_json(content, kind=dict)
        inputs = targets = _read_vocabulary(about["inputs"], folder / "inputs.model")
        if "targets" in about:
            targets = _read_vocabulary(about["targets"], folder / "targets.model")
        lengths = {name: _count(about[name], none=True) for name in _LENGTHS}
        if not isinstance(about["add_eos"], bool):
            raise ValueError(f"add_eos={errors.clip(about['add_eos'])}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.UserError(
            f"{folder}, the vocabularies of the model, cannot be read "
            f"({errors.clip(error, limit=300)}); put its files "
            "back, or remove the folder and name the vocabulary (--vocabulary=FILE.model)."
        ) from error
    return KeptText(inputs, targets, about["add_eos"], **lengths)


def _names(text: KeptText) -> list[str]:
    return ["inputs"] if text.inputs == text.targets else ["inputs", "targets"]


def _read_vocabulary(about: Mapping[str, Any], file: epath.Path) -> KeptVocabulary:
    ((kind, num_sentinels),) = about.items()
    _count(num_sentinels)
    if kind == "characters":
        return KeptVocabulary("characters", num_sentinels)
    if kind == "sentencepiece":
        return KeptVocabulary("sentencepiece", num_sentinels, read_model(file))
    raise ValueError(f"{errors.clip(kind)} is no kind of vocabulary")


def read_model(file: epath.PathLike) -> bytes:
    """Returns a SentencePiece model as it is; raises `ValueError` for a file that is none."""
    model = foreign_files.read_bytes(file, foreign_files.MOST_VOCABULARY_BYTES)
    try:
        processor = processor_of(model)
    except RuntimeError:
        raise ValueError("it is no SentencePiece model") from None
    if processor.eos_id() < 0:
        raise ValueError("it has no end piece")
    return model


def _count(value: Any, *, none: bool = False) -> Any:
    if (value is None and none) or (type(value) is int and 0 <= value <= MOST_TOKENS):
        return value
    raise ValueError(f"{errors.clip(value)} is no count up to {MOST_TOKENS:,}")


def _pieces(model: bytes) -> list[str]:
    """Returns the pieces of a SentencePiece model without sentinels at its end."""
    processor = processor_of(model)
    pieces = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    while pieces and SENTINEL_PIECE.fullmatch(pieces[-1]):
        pieces.pop()
    return pieces


def processor_of(model: bytes) -> Any:
    """Returns the SentencePiece processor of the contents of a model file."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor
