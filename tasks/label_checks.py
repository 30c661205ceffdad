"""Checks labels before the first step: the vocabulary must reproduce them, and they must fit."""

import os
from collections.abc import Sequence

import seqio

from convt5 import errors

from . import vocabularies


def labels_of(task: seqio.Task) -> list[str]:
    """Returns the labels of a task, as given to its metrics."""
    for function in task.metric_fns:
        labels = getattr(function, "keywords", {}).get("labels")
        if labels is not None:
            return list(labels)
    return []


def check_ids(labels: Sequence[str], vocabulary: seqio.Vocabulary, task: str) -> None:
    """Checks that a vocabulary on this machine distinguishes and reproduces labels.

    Raises:
        UserError: two labels have the same ids, or ids do not decode to their label.
    """
    if not _is_at_hand(vocabulary):
        return  # T5's own vocabulary, which is downloaded when first used.
    name = getattr(vocabulary, "sentencepiece_model_file", type(vocabulary).__name__)
    remedy = (
        "rename it, such as labels={'0': 'negative', '1': 'positive'}, or take another vocabulary."
    )
    first: dict[tuple[int, ...], str] = {}
    for label in labels:
        other = first.setdefault(tuple(vocabulary.encode(label)), label)
        if other != label:
            raise errors.UserError(
                f"labels {other!r} and {label!r} of {task} have the same ids in the vocabulary "
                f"{name}, which lacks the characters that distinguish them; {remedy}"
            )
    for ids, label in first.items():
        back = vocabulary.decode(list(ids))
        if back != label or vocabularies.has_unknown(vocabulary, ids):
            raise errors.UserError(
                f"label {label!r} of {task} decodes with the vocabulary {name} to {back!r}, so "
                f"no answer can equal it; {remedy}"
            )


def check_lengths(task: seqio.Task, limit: int, setting: str) -> None:
    """Checks that no label of a task would be truncated.

    Args:
        task: a task with or without labels.
        limit: longest target in tokens, including the end token.
        setting: name of the limit's setting, for the message.

    Raises:
        UserError: a label is longer.
    """
    feature = task.output_features["targets"]
    if not _is_at_hand(feature.vocabulary):
        return
    needed = longest(task) or 0
    if needed <= limit:
        return
    labels = labels_of(task)
    ids = {label: list(feature.vocabulary.encode(label)) for label in labels}
    room = limit - feature.add_eos
    faults = []
    for label, tokens in ids.items():
        if len(tokens) <= room:
            continue
        cut = feature.vocabulary.decode(tokens[:room])
        same = [other for other in labels if other != label and ids[other][:room] == tokens[:room]]
        faults.append(
            f"label {label!r} takes {len(tokens) + feature.add_eos} tokens, end token included, "
            f"but {setting}={limit} leaves {cut!r} of it"
            + (f", as of {same[0]!r}" if same else "")
            + f"; set {setting} to at least {needed}, or give the label a shorter text "
            f"(labels={{{label!r}: ...}})."
        )
    errors.raise_all(errors.abbreviate(faults), where=task.name)


def longest(task: seqio.Task) -> int | None:
    """Returns the tokens of the longest label, end token included; None if there are no labels."""
    feature = task.output_features["targets"]
    lengths = [len(feature.vocabulary.encode(label)) for label in labels_of(task)]
    return max(lengths) + feature.add_eos if lengths else None


def _is_at_hand(vocabulary: seqio.Vocabulary) -> bool:
    path = getattr(vocabulary, "sentencepiece_model_file", None)
    if path is None:
        return isinstance(vocabulary, seqio.ByteVocabulary)
    return os.path.isfile(os.path.expanduser(path))
