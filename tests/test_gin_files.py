"""Gin files may come from anybody: what would take for ever, or all memory, ends in a message."""

import os
import resource
import time

import pytest
from quick import quick

from convt5 import errors, train
from convt5.configuration import gin_config

HEAD = (
    "from __gin__ import dynamic_registration\n"
    "from convt5.configuration import gin_config\nROOT = @gin_config.folder()\n"
)
LAST = "gin_config.folder.parts = ['x']\n"


def doubling(count: int, value: str, last: str) -> str:
    """Settings each of which holds the next one twice."""
    lines = (value.format(this=f"A{i}", next=f"A{i + 1}") for i in range(count))
    return "\n".join([*lines, last.format(this=f"A{count}")])


FOLDER = "gin_config.folder"
BOMBS = {
    "macros that double": doubling(60, "{this} = [%{next}, %{next}]", "{this} = 1")
    + "\ngin_config.folder.parts = [%A0]",
    "macros that double in dictionaries": doubling(
        60, "{this} = {{'a': %{next}, 'b': %{next}}}", "{this} = 1"
    )
    + "\ngin_config.folder.parts = [%A0]",
    "objects that double": doubling(
        38,
        f"{{this}}/{FOLDER}.parts = [@{{next}}/{FOLDER}(), @{{next}}/{FOLDER}()]",
        f"{{this}}/{FOLDER}.parts = ['x']",
    )
    + "\ngin_config.folder.parts = [@A0/gin_config.folder()]",
    "macros in one another": "\n".join(f"A{i} = %A{i + 1}" for i in range(3000))
    + "\nA3000 = 'x'\ngin_config.folder.parts = [%A0]",
    "macros in one another, backwards": "A0 = 'x'\n"
    + "\n".join(f"A{i + 1} = [%A{i}]" for i in range(3000))
    + "\ngin_config.folder.parts = %A3000",
    "macros in a circle": "A = %B\nB = [%A]\ngin_config.folder.parts = [%A]",
    "lists in one another": f"gin_config.folder.parts = {'[' * 500_000}",
    "closed lists in one another": f"gin_config.folder.parts = {'[' * 80}1{']' * 80}",
    "closed lists with a macro": f"A = 1\ngin_config.folder.parts = {'[' * 60}%A{']' * 60}",
    "dictionaries in one another": f"gin_config.folder.parts = {'{1:' * 90}1{'}' * 90}",
    "signs before a number": f"gin_config.folder.parts = {'-' * 30_000}1",
    "a number of many digits": f"gin_config.folder.parts = {'9' * 100_000}",
    "a name of many letters": f"{'a' * 900_000} = 1",
    "a name of many parts": f"{'a.' * 30_000}a = 1",
    "a name of many scopes": f"gin_config.folder.parts = [@{'a/' * 30_000}gin_config.folder()]",
    "a setting in many scopes": f"{'a/' * 30_000}gin_config.folder.parts = []",
    "an import of many parts": f"import {'a.' * 30_000}a",
    "many settings": "\n".join(f"A{i} = 1" for i in range(10_000)),
    "many settings that are alike": "\n".join(f"AAAAAAAAAAAAAAAA{i} = 1" for i in range(4_900)),
    "many macros that are not there": "\n".join(f"AAAAAA{i} = %BAAAAAA{i}" for i in range(4_900)),
    "many names that are not there": "\n".join(f"gin_confi{i}.a = 1" for i in range(4_900)),
    "many parameters that are not there": "\n".join(f"{FOLDER}.part{i} = 1" for i in range(4_900)),
    "a large file": "#" * 3_000_000,
    "zero bytes": "A = 1\0\n",
    "a file that includes itself": "include 'bomb.gin'",
    "many includes": "include 'leaf.gin'\n" * 4_000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def bounded(tmp_path, monkeypatch):
    """An empty directory; ten processor seconds and some megabytes are enough for every answer."""
    monkeypatch.chdir(tmp_path)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # Kilobytes.


def message(*files: str, bindings=()) -> str:
    with pytest.raises(errors.UserError) as caught:
        gin_config.load(files, bindings, roots=["%ROOT"])
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert len(text) < 12_000
    return text


@pytest.mark.parametrize("kind", quick(list(BOMBS), chosen=list(BOMBS)[::3]))
def test_settings_that_explode_end_in_one_message(tmp_path, kind):
    (tmp_path / "leaf.gin").write_text("")
    (tmp_path / "bomb.gin").write_text(HEAD + BOMBS[kind])
    message("bomb.gin")


def test_files_that_include_twice_what_includes_twice_are_bounded(tmp_path):
    for i in range(60):
        (tmp_path / f"f{i}.gin").write_text(f"include 'f{i + 1}.gin'\n" * 2)
    (tmp_path / "f60.gin").write_text(LAST)
    assert "more than" in message("f0.gin")
    for i in range(15):
        (tmp_path / f"f{i}.gin").write_text(f"include 'f{i + 1}.gin'\n" * 2)
    (tmp_path / "f15.gin").write_text(LAST)
    assert "more than" in message("f0.gin")


@pytest.mark.parametrize("kind", ["pipe", "device", "endless", "folder", "sparse", "gone", "home"])
def test_what_is_no_ordinary_file_is_not_read(tmp_path, kind):
    path = tmp_path / "bomb.gin"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "endless":
        path.symlink_to("/dev/stdin")
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**36)
    elif kind == "gone":
        path.symlink_to(path)
    name = "~nobody-here/bomb.gin" if kind == "home" else "bomb.gin"
    (tmp_path / "a.gin").write_text(f"include '{name}'\n")
    assert "bomb.gin" in message(name)
    assert "bomb.gin" in message("a.gin")
    with pytest.raises(errors.UserError):
        train.main([f"--gin_file={name}", "--dry_run"])


@pytest.mark.parametrize("value", ["[" * 100_000, "-" * 100_000 + "1", "[" * 80 + "]" * 80])
def test_values_of_the_command_line_are_bounded_too(tmp_path, value):
    (tmp_path / "a.gin").write_text(HEAD + LAST)
    message("a.gin", bindings=[f"gin_config.folder.parts={value}"])


def test_what_people_write_is_far_below_the_bounds(tmp_path):
    labels = ", ".join(f"'label {i}'" for i in range(3_000))
    (tmp_path / "a.gin").write_text(f"{HEAD}gin_config.folder.parts = [{labels}]\n")
    assert gin_config.load(["a.gin"], roots=["%ROOT"]).macro("ROOT").startswith("label 0/label 1/")
