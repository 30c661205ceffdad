"""Writes a SentencePiece vocabulary as tokenizer.json, which the library `tokenizers` reads.

transformers' own `T5Tokenizer` has no byte pieces and its own rule for spaces, so the ids of some
texts would be others than those that a model was trained with.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

_SPACE = "▁"
_UNIGRAM = 1
_SPECIAL_TYPES = _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def parse(model: bytes) -> Any:
    """Returns the contents of a SentencePiece model file as a message of protobuf."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # Its contents are generated at import.
    return messages.ModelProto.FromString(model)


def describe(model: bytes, marks: Mapping[int, str]) -> dict[str, Any] | None:
    """Returns the contents of tokenizer.json; None for a model that it cannot express.

    Such are models of another type than unigram; those that put the space of a word behind it;
    those with unused pieces, which `tokenizers` would use; and those with symbols that a user
    defined beside sentinels, behind each of which it begins a new text, without the space before.

    Args:
        model: contents of a SentencePiece model file.
        marks: text of each sentinel by id; ids beyond the model's pieces must follow them.
    """
    proto = parse(model)
    trained = proto.trainer_spec
    by_type = {t: {i for i, p in enumerate(proto.pieces) if p.type == t} for t in _SPECIAL_TYPES}
    others = (by_type[_USER_DEFINED] | by_type[_UNUSED]) - marks.keys()
    if trained.model_type != _UNIGRAM or trained.treat_whitespace_as_suffix or others:
        return None
    # Not the ids of `trained`: pieces may have been put in since.
    (unknown,) = by_type[_UNKNOWN]
    end = next(i for i, piece in enumerate(proto.pieces) if piece.piece == trained.eos_piece)
    pieces = [[piece.piece, piece.score] for piece in proto.pieces]
    pieces += [["", 0.0] for _ in range(len(pieces), max(marks, default=0) + 1)]
    for token, mark in marks.items():
        pieces[token] = [mark, 0.0]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(token, pieces[token][0])
            for token in sorted(by_type[_CONTROL] | {unknown} | marks.keys())
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(proto.normalizer_spec)},
        "pre_tokenizer": None,
        "post_processor": _end_token(end, pieces[end][0]),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": pieces,
            "byte_fallback": trained.byte_fallback,
        },
    }


def _normalizers(spec: Any) -> Sequence[dict[str, Any]]:
    """Returns SentencePiece's normalization of a text, in its order."""
    rules = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        rules.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        rules += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
    if spec.add_dummy_prefix:
        rules.append(_replace(r"\A(?!\z)", " "))
    return [*rules, _replace(" ", _SPACE)]


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _added(token: int, content: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, **plain, "special": True}


def _end_token(token: int, content: str) -> dict[str, Any]:
    """Returns the rule that ends every text with the end token."""
    end = {"SpecialToken": {"id": content, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, end, second, end],
        "special_tokens": {content: {"id": content, "ids": [token], "tokens": [content]}},
    }
