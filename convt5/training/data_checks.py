"""Checks that the data of a run fits its model: lengths, vocabularies, labels and first rows."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.text import vocabulary_files

Data = Mapping[str, Any]
"""Descriptions of batches by the name of their setting; None if absent."""


def check_model(model: Any, *parts: Any) -> None:
    """Raises `UserError` if data, loss or report do not fit the model, as far as is known."""
    for part in parts:
        check = getattr(part, "check_model", None)
        if check is not None:
            check(model)


def check_lengths(model: Any, data: Data) -> None:
    """Raises `UserError` if the data has rows longer than the model's table of positions."""
    if not hasattr(model, "most_tokens"):
        return
    faults = [
        f"{name}.{stack}_length={length} is longer than {limit}, the tokens that the model's "
        f"max_positions={model.max_positions} learned positions reach; lower {stack}_length or "
        "raise max_positions."
        for name, config in data.items()
        for stack in ("encoder", "decoder")
        if (limit := model.most_tokens(stack))
        and (length := getattr(config, f"{stack}_length", None) or 0) > limit
    ]
    errors.raise_all(faults, where="configuration")


def check_images_apart(train: Any, held_out: Any) -> None:
    """Raises `UserError` if two splits are the same images, because their path names no split."""
    source = getattr(held_out, "source", None)
    path = getattr(source, "path", None)
    if path is None or "{split}" in path or source != getattr(train, "source", None):
        return
    if held_out.split != train.split:
        raise errors.UserError(
            f"eval_data: split={held_out.split!r} of path={path!r} is the same images as split="
            f"{train.split!r} of train_data, because the path is without {{split}}; write it where "
            "the paths of the splits differ, such as 'images_{split}.npz', or bind one path in the "
            "scope train/ and another in eval/."
        )


def check_class_names(names: Sequence[str], trained: Sequence[str], *, where: str) -> None:
    """Raises `UserError` if labels stand for other classes than in training.

    Args:
        names: names of the labels of some images; empty if they have none.
        trained: those of the images that the model was trained on.
        where: the setting of the images, for the message.
    """
    for label, (name, known) in enumerate(zip(names, trained, strict=False)):
        if name != known:
            raise errors.UserError(
                f"{where}: label {label} is the class {errors.clip(name)}, but in training "
                f"{errors.clip(known)}; give images of the same classes. Folders are numbered in "
                "the order of their names: those of absent classes can be empty."
            )


def check_files_apart(train: Any, *held_out: Any) -> None:
    """Raises `UserError` if files that measure the model are among those that it is trained on."""
    for each in held_out:
        if hasattr(each, "check_apart") and hasattr(train, "check_held_out"):
            each.check_apart(train)


def check_vocabulary(model: Any, data: Data) -> None:
    """Checks that the tasks of a mixture have one vocabulary, with an embedding for each id.

    Raises:
        UserError: they have not.
    """
    limit = getattr(model, "vocab_size", None)
    if limit is None:
        return  # No text: nothing to compare.
    for name, config in data.items():
        if hasattr(config, "check_vocabularies"):
            config.check_vocabularies()
        for feature, size in _vocabulary_sizes(config).items():
            if size > limit:
                raise errors.UserError(
                    f"the vocabulary of {feature!r} of {name} has {size} ids, sentinels "
                    f"included, but vocab_size={limit} is the number of rows of the model's "
                    "token table; set --gin.architecture.ConvT5Config.vocab_size to at least "
                    f"{size}."
                )


def check_same_vocabulary(train: Any, measured: Mapping[str, Any]) -> None:
    """Raises `UserError` if data that measures a model has other ids than what trains it.

    Args:
        train: the data that trains it.
        measured: the data that measures it, by the name of its setting; None if absent.
    """
    trained = vocabulary_files.of_data(train)
    for name, data in measured.items():
        text = vocabulary_files.of_data(data)
        if trained is None or text is None:
            continue
        for half in ("inputs", "targets"):
            own, known = getattr(text, half), getattr(trained, half)
            if not own.agrees_with(known, in_sentinels=text.holds_sentinels):
                raise errors.UserError(
                    f"{name}: its {half} have the vocabulary {own.fingerprint}, but those of "
                    f"train_data have {known.fingerprint}, so ids would stand for other text; give "
                    "both the same vocabulary."
                )


def vocabulary_is_here(data: Data) -> bool:
    """Returns whether all vocabulary files are local files that exist."""
    providers = [getattr(config, "provider", None) for config in data.values()]
    features = [f for find in providers if find for f in find().output_features.values()]
    files = [getattr(f.vocabulary, "sentencepiece_model_file", None) for f in features]
    return all(file is None or os.path.isfile(file) for file in files)


def check_labels(data: Data) -> None:
    """Checks the labels, if the data has labels."""
    for config in data.values():
        if hasattr(config, "check_labels"):
            config.check_labels()


def check_rows(data: Data) -> None:
    """Checks the tasks and the first rows of files, if the data can be checked."""
    for config in data.values():
        if hasattr(config, "provider"):
            config.provider()
        if hasattr(config, "check_rows"):
            config.check_rows()


def row_lengths(data: Data) -> dict[str, int] | None:
    """Returns the tokens per row by the name of their setting; None for data without tokens."""
    lengths = {
        f"{name}.{field}": getattr(config, field)
        for name, config in data.items()
        for field in ("encoder_length", "decoder_length")
        if hasattr(config, field)
    }
    return lengths or None


def _vocabulary_sizes(data: Any) -> dict[str, int]:
    """Returns the vocabulary size of each feature of text batches; empty for other data."""
    if hasattr(data, "provider"):
        features = data.provider().output_features.items()
        return {name: feature.vocabulary.vocab_size for name, feature in features}
    size = getattr(data, "vocab_size", None)  # All that cached rows store of their vocabulary.
    return {} if size is None else {"targets": size}
