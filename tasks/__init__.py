"""Tasks of convt5; importing this package registers them with seqio.

For example, `seqio.get_mixture_or_task("pydoc_span_corruption")` then finds one by name.
"""

from convt5.runtime import quiet_imports

with quiet_imports.without_tensorflow_chatter():
    from . import (
        classification,
        cloze_questions,
        cogs,
        denoising,
        pretraining,
        squad,
        synthetic,
        vocabularies,
        word_recall,
    )

__all__ = [
    "classification",
    "cloze_questions",
    "cogs",
    "denoising",
    "pretraining",
    "squad",
    "synthetic",
    "vocabularies",
    "word_recall",
]
