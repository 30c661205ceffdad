"""Fillings shown in the documents are of examples that the rule chooses, whoever filled them."""

import fillings
import pytest

from convt5 import errors

LONG = [f"w{number}" for number in range(40)]


def text(*documents):
    return [line for document in documents for line in (*document, "")]


def test_each_document_gives_the_start_of_its_first_long_paragraph():
    first = ["too short", " ".join(LONG), " ".join(reversed(LONG))]
    third = [" ".join(f"*{word}" for word in LONG[:30])]
    gap, other = fillings.gaps(text(first, ["nothing of length"], third))
    assert gap == (" ".join(LONG[:14]), "w14 w15 w16", " ".join(LONG[17:30]))
    assert gap.source() == " ".join([*LONG[:14], "<extra_id_0>", *LONG[17:30]])
    assert other.truth == "*w14 *w15 *w16"


@pytest.mark.parametrize(
    ("prediction", "filled"),
    [
        ("<extra_id_0> a good film <extra_id_1> and", "a good film"),
        ("<extra_id_0> a good film", "a good film"),
        ("<extra_id_0><extra_id_1>", ""),
        ("no span at all", ""),
    ],
)
def test_the_first_span_of_a_prediction_is_the_filling(prediction, filled):
    assert fillings.filling(prediction) == filled


def test_the_table_counts_what_is_equal_and_shows_marks_as_text():
    chosen = [fillings.Gap("a | b", "*c*", "d"), fillings.Gap("e", "f", "g")]
    shown = fillings.table(chosen, ["*c*", "other"])
    assert r"a \| b … d" in shown
    assert r"\*c\*" in shown
    assert shown.endswith("Equal to what was hidden: 1 of 2.")


def test_a_text_with_too_few_documents_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(text([" ".join(LONG)])))
    with pytest.raises(errors.UserError, match=r"has 1 documents .* --num=2 takes more"):
        fillings.main(["--checkpoint=none", f"--text={tmp_path / 'text.txt'}", "--num=2"])
