"""Pre-training tasks: span corruption of C4, of any local text, and of the text inside Python.

Importing this registers those without settings with seqio. Gin files call the functions:
`train/data.DataConfig.mixture = @pretraining.text_span_corruption()`.
"""

import dataclasses
import functools
import pydoc_data.topics
from collections.abc import Mapping, Sequence

import seqio

from convt5 import errors
from convt5.errors import checks
from convt5.runtime import descriptions, local_files
from convt5.runtime.local_files import InvalidUtf8

from . import registration, vocabularies
from .sources import EmbeddedTextSource, PreparedTfdsSource, TextFilesSource
from .span_corruption import MEAN_SPAN_LENGTH, NOISE_DENSITY, span_corruption, text_as_targets
from .text_files import Separator, TextFiles

C4 = "c4/en:3.1.0"
_PYDOC_HOLDOUT_EVERY = 10


def span_corruption_task(
    name: str,
    source: seqio.DataSource,
    vocabulary: seqio.Vocabulary,
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    merge_documents: bool = True,
) -> seqio.Task:
    """Returns a task that corrupts the documents of `source`, in the field "text".

    Args:
        name: shown in logs; the task is not registered.
        source: any seqio source.
        vocabulary: a vocabulary whose last ids are sentinels.
        noise_density: fraction of the tokens to corrupt, in (0, 1).
        mean_span_length: mean length of a corrupted span in tokens, at least 1.
        merge_documents: concatenates all documents and cuts them into segments of equal length, as
            T5 does; otherwise segments end with their document, for packing.
    """
    faults = []
    if not 0 < noise_density < 1:
        faults.append(f"noise_density={noise_density} must be in (0, 1); T5 takes 0.15.")
    if not mean_span_length >= 1:
        faults.append(f"mean_span_length={mean_span_length} must be at least 1; T5 takes 3.")
    errors.raise_all(faults, where=name)
    feature = seqio.Feature(vocabulary=vocabulary, add_eos=True)
    return registration.task(
        name,
        source=source,
        preprocessors=[
            text_as_targets,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.CacheDatasetPlaceholder(),
            functools.partial(
                span_corruption,
                noise_density=noise_density,
                mean_span_length=mean_span_length,
                merge_documents=merge_documents,
            ),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[],
    )


@dataclasses.dataclass(frozen=True)
@checks.typed
class TextSpanCorruption:
    """Span corruption of local text: plain or .jsonl, .ndjson, .json, also .gz, .xz, .bz2.

    Attributes:
        path: a path, glob or folder, or several.
        vocabulary: for instance from `vocabularies.sentencepiece`; None means bytes.
        separator: "line", "blank_line", or "auto", which examines the first file of `path`.
        text_key: the key of the text in a .jsonl line.
        validation_path: files of the "validation" split.
        validation_fraction: fraction of the documents of `path` held out if `validation_path` is
            None, in [0, 0.5]: every n-th document, where n is 1 / validation_fraction rounded. 0
            makes no "validation" split.
        noise_density: fraction of the tokens to corrupt, in (0, 1).
        mean_span_length: mean length of a corrupted span in tokens, at least 1.
        merge_documents: see `span_corruption_task`.
        invalid_utf8: what to do with text that is not UTF-8: "refuse" raises an error that names
            file and line, "replace" inserts U+FFFD, "skip" skips the document.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: `build` finds that a path matches nothing, files belong to both, or a value is
            out of range.
    """

    path: str | Sequence[str]
    vocabulary: seqio.Vocabulary | None = None
    _: dataclasses.KW_ONLY
    separator: Separator = "auto"
    text_key: str = "text"
    validation_path: str | Sequence[str] | None = None
    validation_fraction: float = 0.01
    noise_density: float = NOISE_DENSITY
    mean_span_length: float = MEAN_SPAN_LENGTH
    merge_documents: bool = True
    invalid_utf8: InvalidUtf8 = "refuse"
    name: str = "text_span_corruption"

    def build(self) -> seqio.Task:
        """Returns the task."""
        return span_corruption_task(
            self.name,
            TextFilesSource(self._splits()),
            self.vocabulary or vocabularies.characters(),
            noise_density=self.noise_density,
            mean_span_length=self.mean_span_length,
            merge_documents=self.merge_documents,
        )

    def _splits(self) -> dict[str, tuple[TextFiles, str]]:
        every = local_files.holdout_every(self.validation_fraction)
        files = functools.partial(
            TextFiles,
            separator=self.separator,
            text_key=self.text_key,
            invalid_utf8=self.invalid_utf8,
        )
        if self.validation_path is not None:
            train = files(path=self.path)
            held_out = files(path=self.validation_path, after=train)
            local_files.check_apart({"train": train.files(), "validation": held_out.files()})
            return {"train": (train, "train"), "validation": (held_out, "train")}
        both = files(path=self.path, holdout_every=every)
        return {split: (both, split) for split in ("train", *["validation"] * (every is not None))}


text_span_corruption = descriptions.function(
    "text_span_corruption", TextSpanCorruption, TextSpanCorruption.build
)


def c4_span_corruption(
    vocabulary: seqio.Vocabulary | None = None,
    *,
    tfds_name: str = C4,
    data_dir: str | None = None,
    splits: Mapping[str, str] | None = None,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    merge_documents: bool = True,
    name: str = "c4_span_corruption",
) -> seqio.Task:
    """Returns span corruption of C4, or of any TFDS data set with a "text" feature.

    Args:
        vocabulary: None means T5's own, which is downloaded.
        tfds_name: name, configuration and version for TFDS.
        data_dir: folder of prepared TFDS data; None means TFDS's `~/tensorflow_datasets`.
        splits: TFDS's name or slice of each split, such as {"train": "train[:99%]", "validation":
            "train[99%:]"}; None means TFDS's "train" and "validation".
        noise_density: fraction of the tokens to corrupt, in (0, 1).
        mean_span_length: mean length of a corrupted span in tokens, at least 1.
        merge_documents: see `span_corruption_task`.
        name: name of the task; use the same one if you register it.
    """
    return span_corruption_task(
        name,
        PreparedTfdsSource(tfds_name, data_dir, splits, fields=("text",)),
        vocabulary or vocabularies.published_t5(),
        noise_density=noise_density,
        mean_span_length=mean_span_length,
        merge_documents=merge_documents,
    )


def pydoc_span_corruption(
    vocabulary: seqio.Vocabulary | None = None,
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    merge_documents: bool = True,
    name: str = "pydoc_span_corruption",
) -> seqio.Task:
    """Returns span corruption of Python's own documentation, which every Python contains.

    Args:
        vocabulary: None means bytes.
        noise_density: fraction of the tokens to corrupt, in (0, 1).
        mean_span_length: mean length of a corrupted span in tokens, at least 1.
        merge_documents: see `span_corruption_task`.
        name: name of the task; use the same one if you register it.
    """
    documents = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    held_out = documents[1::_PYDOC_HOLDOUT_EVERY]
    source = EmbeddedTextSource(
        {
            "train": [text for text in documents if text not in held_out],
            "validation": held_out,
        }
    )
    return span_corruption_task(
        name,
        source,
        vocabulary or vocabularies.characters(),
        noise_density=noise_density,
        mean_span_length=mean_span_length,
        merge_documents=merge_documents,
    )


registration.add(pydoc_span_corruption())
registration.add(c4_span_corruption())
