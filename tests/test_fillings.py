"""Fillings shown in the documents are those of the gaps that they stand beside."""

import fillings

SOURCE = "The <1> fox jumps <2> the lazy <3>"
TRUTH = "<1> quick brown <2> over <3> dog"


def test_each_gap_has_the_text_around_it_its_filling_and_its_truth():
    found = fillings.gaps(SOURCE, "<1> quick <2> over<3> ", TRUTH)
    assert found == [
        ("The", "quick", "quick brown", "fox jumps"),
        ("fox jumps", "over", "over", "the lazy"),
        ("the lazy", "", "dog", ""),
    ]


def test_gaps_that_the_model_did_not_reach_are_not_filled():
    found = fillings.gaps(SOURCE, "quick <2> over <7> more", TRUTH)
    assert [gap.filled for gap in found] == [None, "over", None]


def test_the_table_shows_the_middle_gap_and_counts_all():
    rows = [
        fillings.gaps(SOURCE, TRUTH, TRUTH),
        fillings.gaps("a | b <1> *c*", "<1> nothing", "<1> x_y"),
    ]
    shown = fillings.table(rows)
    assert r"fox jumps \[...\] the lazy" in shown
    assert r"a \| b \[...\] \*c\*" in shown
    assert r"x\_y" in shown
    assert shown.endswith(
        "Of all 4 gaps of these rows, 3 are filled with exactly what was removed (75%)."
    )


def test_only_some_words_around_a_gap_are_shown():
    words = [f"w{number}" for number in range(40)]
    text = fillings.table([fillings.gaps(" ".join([*words, "<1>", *words]), "<1> a", "<1> a")])
    assert r"| w28 w29" in text
    assert r"w10 w11 |" in text
