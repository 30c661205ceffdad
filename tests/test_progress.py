"""What a terminal shows of work that tells no progress of its own."""

import io

import pytest

from convt5.runtime.progress import elapsed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_goes_on_and_is_left_clean():
    out = Terminal()
    with pytest.raises(ValueError, match="broken"), elapsed("compiling", out=out):
        raise ValueError("broken")
    _, shown, cleared, rest = out.getvalue().split("\r")
    assert shown == "compiling: 0s"
    assert cleared == " " * len(shown)
    assert rest == ""


def test_nothing_is_written_elsewhere():
    out = io.StringIO()
    with elapsed("compiling", out=out):
        pass
    assert out.getvalue() == ""
