"""Figures can be read in print: lines differ in more than colour, ticks are plain numbers."""

import itertools

import pytest

from convt5.errors import UserError
from convt5.reports import figures
from convt5.runtime import metric_names

pytest.importorskip("matplotlib")


def axes():
    return figures.figure_class("a test")(figsize=(5, 4)).subplots()


def labels(axis) -> list[str]:
    axis.get_figure().canvas.draw()
    return [label.get_text() for label in axis.get_ticklabels() if label.get_text()]


def test_fifty_lines_look_different_and_neighbours_differ_without_colour():
    looks = [figures.style(number) for number in range(50)]
    assert len({(x["color"], x["linestyle"], x["marker"]) for x in looks}) == 50
    for one, other in itertools.pairwise(looks):
        assert one["linestyle"] != other["linestyle"]
        assert one["marker"] != other["marker"]


def test_of_lines_that_coincide_each_leaves_the_one_below_visible():
    solid, *others = (figures.style(number, points=100) for number in range(5))
    for below, above in itertools.pairwise([solid, *others]):
        assert above["zorder"] > below["zorder"]
        assert above["linewidth"] < below["linewidth"]
        assert above["linestyle"] != "-"
    assert len({style["markevery"][0] for style in (solid, *others)}) == 5


@pytest.mark.parametrize("values", [[512, 2048], [1024, 4096], [0.001, 0.01]])
def test_two_values_of_a_logarithmic_axis_are_named_plainly(values):
    drawn = axes()
    drawn.plot(values, [1, 2])
    drawn.set_xscale("log", base=2)
    figures.name_values(drawn.xaxis, values)
    assert labels(drawn.xaxis) == [f"{value:,g}" for value in values]


@pytest.mark.parametrize(
    "values",
    [[0.21, 0.24], [0.2, 3.0], [3.9e9, 4.1e9], [1e3, 1e9], [0.5, 0.0, 0.01], [7.0, 7.0], [0.0], []],
)
def test_logarithmic_values_have_plain_labels_at_any_span(values):
    drawn = axes()
    drawn.plot(range(len(values)), values)
    figures.log_values(drawn, values)
    shown = labels(drawn.yaxis)
    assert len(shown) >= (2 if len(set(values)) > 1 else 0)
    assert not any("$" in label or "^" in label for label in shown)


@pytest.mark.parametrize("least", [0.0667, 0.011, 1.3, 0.5, 2e-5])
def test_labels_beside_zero_do_not_overlap(least):
    values = [0.0, least, 60.0]
    drawn = axes()
    drawn.plot(range(3), values)
    figures.log_values(drawn, values)
    drawn.figure.canvas.draw()
    shown = [label.get_window_extent() for label in drawn.get_yticklabels() if label.get_text()]
    inside = sorted((box.y0, box.y1) for box in shown)
    assert len(inside) >= 3
    assert all(below[1] <= above[0] for below, above in itertools.pairwise(inside))


def test_a_label_is_shown_letter_by_letter():
    assert figures.text("_a$b") == r" _a\$b"
    assert "\x1b" not in figures.text("\x1b[31m")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_letter_that_no_font_has_is_escaped_and_no_warning_shown(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(figures, "_families", {})
    (default, file), *_ = figures._fonts()
    monkeypatch.setattr(figures, "_fonts", lambda: [(default, file)])
    assert figures.text("Größe, \u0434 \u8bc4\U0001f92f\n") == "Größe, \u0434 \\u8bc4\\U0001f92f\n"
    drawn = axes()
    drawn.set_title(figures.text("\u8bc4\u4ef7"))  # Warnings are errors.
    figures.save(drawn.figure, tmp_path / f"picture{suffix}")
    assert (tmp_path / f"picture{suffix}").stat().st_size > 1000


def test_a_letter_of_another_font_is_drawn_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "_families", {})
    letter = "\u1d15"  # Of those that come with Matplotlib, only serif fonts have it.
    drawn = axes()
    drawn.set_xticks([1, 2], [figures.text(letter), "b"])
    drawn.set_ylabel(figures.text(f"{letter}, %"))
    assert drawn.get_ylabel() == f"{letter}, %"
    figures.save(drawn.figure, tmp_path / "picture.png")  # Warnings are errors.
    assert set(figures._families.values()) == {"DejaVu Sans", "DejaVu Serif"}


def test_a_letter_has_the_first_installed_font_that_shows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "_families", {})
    (default, _), *_ = figures._fonts()
    fonts = [(default, "plain"), ("Other", "wide"), ("Third", "wide")]
    monkeypatch.setattr(figures, "_fonts", lambda: fonts)
    monkeypatch.setattr(figures, "_shows", lambda path, letter: path == "wide" or letter < "\x80")
    assert figures.text("a\u8bc4") == "a\u8bc4"
    assert figures._families == {"a": default, "\u8bc4": "Other"}


@pytest.mark.parametrize("suffix", ["svg", ".nothing", ""])
def test_a_suffix_of_no_format_is_refused(suffix):
    with pytest.raises(UserError, match="must end in one of"):
        figures.check_suffix(suffix)


@pytest.mark.parametrize(
    ("metric", "perfect", "shown"),
    [
        ("trec6/accuracy", 100.0, "error on TREC-6, %"),
        ("trec6/accuracy", None, "accuracy on TREC-6, %"),
        ("task/accuracy", 100.0, "error, %"),
        ("validation/token_accuracy", None, "validation token accuracy, %"),
        ("validation/accuracy", 1.0, "validation error"),
        ("validation/loss", None, "validation loss, nats"),
        ("validation/bits_per_byte", None, "validation bits per byte"),
        ("ema/validation/loss", None, "averaged validation loss, nats"),
        ("squad/f1", 100.0, "100 - f1 on SQuAD, %"),
        ("my_task/exact_match", None, "exact match on my task, %"),
    ],
)
def test_axes_are_named_as_a_reader_says_it(metric, perfect, shown):
    assert metric_names.axis(metric, perfect=perfect) == shown


def test_values_that_cannot_be_drawn_are_told(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("arange: cannot compute length")

    drawn = axes().get_figure()
    monkeypatch.setattr(drawn, "savefig", fail)
    with pytest.raises(UserError, match=r"a\.png cannot be drawn \(arange"):
        figures.save(drawn, tmp_path / "a.png")
