"""How a task writes an input from the fields of a row, the same in training and prediction.

Both the preprocessor of a task and predictions write inputs with `TaskFormat.write`. A run
directory saves the formats of its training tasks as plain values in `task.json`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from convt5 import errors
from convt5.runtime import atomic_files, folders, foreign_files

FILE = "task.json"

_BRACED = re.compile(r"\{([^{}]+)\}")
# Patterns that Python's `re` and RE2, used by TensorFlow, interpret alike.
_PUNCTUATION = r"([!-/:-@\[-`{-~])"
_BLANKS = r"[\t\n\f\r ]+"
_WORD = re.compile(r"\w{4,}")
_STEM_LETTERS = 5


class Field(NamedTuple):
    """A placeholder for a field in an input."""

    name: str


Part = str | Field
Given = str | Mapping[str, Any]
"""An input as given: the text of a task with one field, or a value for each field."""


class FieldError(errors.UserError):
    """An error in an input; the message begins with its location."""

    def at(self, place: str) -> errors.UserError:
        """Returns the error with the location of the input, such as "input 1"."""
        end = "" if str(self).endswith((".", "?")) else "."  # A suggestion ends itself.
        return errors.UserError(f"{place} {self}{end}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFormat:
    """How one task writes its inputs, and what its answers are.

    Attributes:
        task: name of the task.
        parts: texts and fields that make up an input; None if only the task's own code knows.
        strip: whether to strip whitespace around the text of a field, as earlier runs read files.
        space_punctuation: whether to put spaces around punctuation and merge repeated spaces, as T5
            does for SQuAD.
        mark_shared: whether the words that a field shares with an earlier one are marked in it, as
            `mark_shared` does.
        sentinels: whether <extra_id_0> in an input is a sentinel, as in pre-training.
        labels: the answers of a classification; empty for other tasks.
        unknown: the preprocessors that write inputs in an unknown way.
        without_end: which of "inputs" and "targets" do not end with the end token.
    """

    task: str
    parts: tuple[Part, ...] | None
    strip: bool = False
    space_punctuation: bool = False
    mark_shared: bool = False
    sentinels: bool = False
    labels: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    without_end: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields in the order of an input, each once."""
        names = (part.name for part in self.parts or () if isinstance(part, Field))
        return tuple(dict.fromkeys(names))

    @property
    def makes_sentinels(self) -> bool:
        """Whether the task is known to mark spans with sentinels, as pre-training does."""
        return self.sentinels and self.parts is not None

    @property
    def marks(self) -> str:
        """Describes, after a template, what else is written; empty for the fields alone."""
        spaces = ", with spaces around punctuation" * self.space_punctuation
        marked = ", with * before words that a field shares with an earlier one" * self.mark_shared
        return spaces + marked

    @property
    def is_plain(self) -> bool:
        """Whether a text is used unchanged."""
        return self.parts is None or (
            not self.space_punctuation and len(self.parts) == len(self.fields) == 1
        )

    def write(
        self,
        fields: Mapping[str, Any],
        *,
        join: Callable[[Sequence[Any]], Any] = "".join,
        replace: Callable[[Any, str, str], Any] | None = None,
        mark: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Returns an input.

        Args:
            fields: the text of each field.
            join: joins strings.
            replace: replaces each match of a pattern in a string.
            mark: marks shared words, as `mark_shared`. All three default to Python's; a
                preprocessor passes those of TensorFlow, so that there is one definition.
        """
        replace, mark = replace or _replace, mark or mark_shared
        written, earlier = [], []
        for part in self.parts or ():
            text = part
            if isinstance(part, Field):
                text = fields[part.name]
                if self.mark_shared and earlier:
                    text = mark(join(earlier), text)
                earlier += [fields[part.name], " "]
                if self.space_punctuation:
                    text = space_punctuation(text, replace)
            written.append(text)
        text = join(written)
        return single_blanks(text, replace) if self.space_punctuation else text

    def read(self, given: Given) -> str | dict[str, str]:
        """Checks what was given; returns a text, or a text for each of several fields.

        Raises:
            FieldError: a field is missing, empty or not a text, or there is one text for several
                fields.
        """
        if isinstance(given, str):
            if len(self.fields) > 1:
                raise FieldError(
                    f"is one text, but task={self.task} writes an input from {self._field_list()}; "
                    f"give each of them, such as {self.example()}, or send a text as it is with "
                    "raw"
                )
            return self._text(given, self.fields[0] if self.fields else "inputs")
        if not isinstance(given, Mapping):
            raise FieldError(f"is {given!r}, which is neither a text nor a text by field")
        names = self.fields or ("inputs",)
        missing = [name for name in names if name not in given]
        if missing:
            raise FieldError(
                f"has no field {missing[0]!r}, but {sorted(map(str, given))}; task={self.task} "
                f"writes an input from {self._field_list()}.{errors.suggest(missing[0], given)}"
            )
        texts = {name: self._text(given[name], name) for name in names}
        return texts if len(texts) > 1 else next(iter(texts.values()))

    def text(self, given: Given) -> str:
        """Returns the input made from what was given.

        Raises:
            FieldError: as `read`.
        """
        checked = self.read(given)
        if self.is_plain and isinstance(checked, str):
            return checked
        return self.write({self.fields[0]: checked} if isinstance(checked, str) else checked)

    def template(self) -> str:
        """Returns the template of an input, with fields in braces."""
        return "".join(
            part if isinstance(part, str) else f"{{{part.name}}}" for part in self.parts or ()
        )

    def described(self) -> str:
        """Describes in a sentence for the user how inputs are written."""
        if self.parts is None:
            preprocessors = f" ({', '.join(self.unknown)})" if self.unknown else ""
            return (
                f"inputs are passed unchanged: the input format of task={self.task} is unknown, "
                f"because its preprocessors{preprocessors} are custom; format each input as the "
                "task does"
            )
        if self.is_plain:
            return f"inputs are passed unchanged, as task={self.task} reads them"
        written = f"{self.template()!r}{self.marks}"
        return f"inputs are written as {written}, the format of task={self.task}"

    def example(self) -> str:
        """Returns an example of a JSON object with the fields."""
        return json.dumps(dict.fromkeys(self.fields, "..."), ensure_ascii=False)

    def _text(self, value: Any, field: str) -> str:
        # NaN is no text, nor is infinity, which JSON's 1e400 becomes.
        is_no_number = isinstance(value, float) and not math.isfinite(value)
        if not isinstance(value, str | int | float) or is_no_number:
            raise FieldError(f"has {value!r} in the field {field!r}, which must be text")
        text = str(value).strip() if self.strip else str(value)
        if not text.strip() and not self.is_plain:
            raise FieldError(f"has nothing in the field {field!r}; fill it in")
        return text

    def _field_list(self) -> str:
        noun = "the field" if len(self.fields) < 2 else "the fields"
        return f"{noun} {' and '.join(map(repr, self.fields or ('inputs',)))}"


def of_template(task: str, template: str, **settings: Any) -> TaskFormat:
    """Returns the format of a template such as "mnli hypothesis: {hypothesis} premise: {premise}".

    Args:
        task: name of the task.
        template: an input with fields in braces.
        settings: further fields of `TaskFormat`.
    """
    pieces = _BRACED.split(template)  # Text, field, text, ..., field, text.
    parts = (Field(piece) if i % 2 else piece for i, piece in enumerate(pieces))
    return TaskFormat(task=task, parts=tuple(part for part in parts if part != ""), **settings)


def fields_of(template: str) -> list[str]:
    """Returns the fields of a template in order."""
    return _BRACED.findall(template)


def plain(task: str, *, field: str = "inputs", **settings: Any) -> TaskFormat:
    """Returns the format of a task whose input is a single field, unchanged."""
    return TaskFormat(task=task, parts=(Field(field),), **settings)


def unknown(task: str, made_by: Sequence[str]) -> TaskFormat:
    """Returns the format of a task whose own code writes the inputs."""
    return TaskFormat(task=task, parts=None, sentinels=True, unknown=tuple(made_by))


def space_punctuation(text: Any, replace: Callable[[Any, str, str], Any] | None = None) -> Any:
    """Puts spaces around ASCII punctuation and merges repeated spaces, as T5 does for SQuAD."""
    replace = replace or _replace
    return single_blanks(replace(text, _PUNCTUATION, r" \1 "), replace)


def mark_shared(before: str, text: str) -> str:
    """Returns the text with "* " before each word that also stands in the text before.

    So a model whose layers see few positions knows which words of a passage are those of the
    question: the exact match of Chen et al. 2017 (arXiv 1704.00051, section 3.2). Words of four
    letters and more count, and as the same if their first five are, in either case.
    """
    shared = {_stem(word) for word in _WORD.findall(before)}
    return _WORD.sub(lambda found: "* " * (_stem(found[0]) in shared) + found[0], text)


def _stem(word: str) -> str:
    return word.casefold()[:_STEM_LETTERS]


def single_blanks(text: Any, replace: Callable[[Any, str, str], Any]) -> Any:
    return replace(text, _BLANKS, " ")


def of_data(data: Any) -> tuple[TaskFormat, ...]:
    """Returns the formats of the tasks of a `data.DataConfig` or cache; empty for other data."""
    describe = getattr(data, "task_formats", None)
    return tuple(describe()) if describe else ()


def differences(
    used: Iterable[TaskFormat], trained: Sequence[TaskFormat]
) -> list[tuple[TaskFormat, TaskFormat]]:
    """Returns each format that writes inputs otherwise than in training, and that of training.

    That is the format of the same task, or else of tasks with the same template, such as questions
    made from text, of which those of SQuAD are another task.
    """
    changed = []
    for now in used:
        alike = [one for one in trained if one.task == now.task]
        alike = alike or [one for one in trained if one.parts and one.parts == now.parts]
        told = [dataclasses.replace(one, task=now.task).described() for one in alike]
        if told and now.described() not in told:
            changed.append((now, alike[0]))
    return changed


def write(folder: epath.PathLike, formats: Sequence[TaskFormat]) -> None:
    """Writes `task.json` into a folder."""
    text = json.dumps({"tasks": as_json(formats)}, indent=2, ensure_ascii=False) + "\n"
    with atomic_files.replacing(epath.Path(folder) / FILE) as partial:
        partial.write_text(text)


def load(model: epath.PathLike) -> tuple[TaskFormat, ...] | None:
    """Returns the formats saved with a run, one of its steps or an export; None if there are none.

    Raises:
        UserError: the file is damaged.
    """
    folder = folders.run_folder(model, FILE)
    return None if folder is None else _read(folder / FILE)


def as_json(formats: Sequence[TaskFormat]) -> list[dict[str, Any]]:
    """Returns the formats as plain values for `from_json`."""
    return [_as_values(each) for each in formats]


def from_json(values: Any) -> tuple[TaskFormat, ...]:
    """Returns formats from the plain values of `as_json`.

    Raises:
        ValueError, TypeError, KeyError: the values have another structure.
    """
    return tuple(map(_from_values, _list(values)))


def _read(file: epath.Path) -> tuple[TaskFormat, ...]:
    try:
        content = foreign_files.read_bytes(file, foreign_files.MOST_JSON_BYTES)
        return from_json(foreign_files.parse_json(content, kind=dict)["tasks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.UserError(
            f"{file}, how the tasks of the run write their inputs, cannot be read "
            f"({errors.clip(error, limit=300)}); restore the file, or remove it and format "
            "inputs as the task does."
        ) from error


def _as_values(one: TaskFormat) -> dict[str, Any]:
    parts = None
    if one.parts is not None:
        parts = [p if isinstance(p, str) else {"field": p.name} for p in one.parts]
    return {
        "task": one.task,
        "input": parts,
        "strip": one.strip,
        "space_punctuation": one.space_punctuation,
        **({"mark_shared": True} if one.mark_shared else {}),
        "sentinels": one.sentinels,
        "answers": "labels" if one.labels else "text",
        "labels": list(one.labels),
        **({"unknown": list(one.unknown)} if one.parts is None else {}),
        **({"without_end": list(one.without_end)} if one.without_end else {}),
    }


def _from_values(values: Mapping[str, Any]) -> TaskFormat:
    parts = values["input"]
    labels = _texts(values["labels"])
    if len(set(labels)) < len(labels) or not all(label.strip() for label in labels):
        raise ValueError(f"labels={labels!r} are not different texts")
    return TaskFormat(
        task=_of_type(values["task"], str),
        parts=None if parts is None else tuple(map(_part, _list(parts))),
        **{
            name: _of_type(values[name], bool)
            for name in ("strip", "space_punctuation", "sentinels")
        },
        mark_shared=_of_type(values.get("mark_shared", False), bool),
        labels=labels,
        unknown=_texts(values.get("unknown", [])),
        without_end=_texts(values.get("without_end", [])),
    )


def _part(value: Any) -> Part:
    return value if isinstance(value, str) else Field(_of_type(value["field"], str))


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(_of_type(value, str) for value in _list(values))


def _list(value: Any) -> list[Any]:
    return _of_type(value, list)


def _of_type(value: Any, kind: type[Any]) -> Any:
    if isinstance(value, kind):
        return value
    raise TypeError(f"{value!r} is no {kind.__name__}")


def _replace(text: str, pattern: str, rewrite: str) -> str:
    return re.sub(pattern, rewrite, text)
