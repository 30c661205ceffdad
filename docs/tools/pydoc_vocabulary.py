"""Trains the vocabulary of the task pydoc_words again: `python docs/tools/pydoc_vocabulary.py`.

It is made from the sentences that come with the Python that runs this, so another version
of Python may give a few other pieces, and models know only their own.
"""

import pathlib
import sys
import tempfile

from convt5.tasks import word_recall

from convt5.data import vocabulary

SIZE = 4000


def main(output: str = word_recall.VOCABULARY_FILE) -> int:
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "pydoc.txt"
        text.write_text("\n".join(word_recall.pydoc_passages()), encoding="utf-8")
        pathlib.Path(output).unlink(missing_ok=True)
        flags = {"text": text, "size": SIZE, "output": output}
        return vocabulary.main([f"--{name}={value}" for name, value in flags.items()])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
