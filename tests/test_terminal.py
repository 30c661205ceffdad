"""What came from elsewhere never controls a terminal: it is written out, whichever way it comes."""

import io
import json
import logging
import os
import pty
import re
import sys

import commands
import pytest
import tiny_run

from convt5 import compare, errors, infer, inspect, sweep, train
from convt5.evaluation import infer_command
from convt5.reports import markdown
from convt5.runtime import progress, terminal
from convt5.training import run_log

# A title, colours, the cursor, a bell, C1, turned text, and a byte that is no text.
EVIL = "x\x1b]0;owned\x07\x1b[31m\x1b[2J\r\b\x9b31m\x85\x7f\u202e\u2066\u200f\u061c\u2028\udc9by"
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\udc9b]"
)
HARMLESS = "tab\tline\nümlaut é 漢字 🙂 👩‍👩‍👧 עברית العربية"  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def in_terminal(monkeypatch) -> tuple[Terminal, Terminal]:
    """Standard output and standard error of a command in a terminal, from here on."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    terminal.protect()
    return out, err


def test_control_characters_are_written_out_and_everything_else_stays():
    assert not CONTROL.search(errors.printable(EVIL))
    assert errors.printable("\x1b[31m\x9b\u202e") == r"\x1b[31m\x9b\u202e"
    assert errors.printable(HARMLESS) == HARMLESS


@pytest.mark.parametrize("kind", [errors.UserError, errors.TrainingError])
def test_no_message_controls_a_terminal(kind):
    message = str(kind(f"{EVIL} {HARMLESS}"))
    assert not CONTROL.search(message)
    assert HARMLESS in message
    assert len(str(kind("a" * 10**6))) < 20_000


def test_a_table_holds_text_alone():
    text = markdown.table([{EVIL: EVIL, "b": "1\n| 2"}])
    assert not CONTROL.search(text)
    assert len(text.splitlines()) == 3


def test_what_a_process_prints_and_logs_is_written_out(monkeypatch):
    out, err = in_terminal(monkeypatch)
    print(EVIL)
    print(EVIL, file=sys.stderr)
    sys.stdout.writelines([EVIL])
    logging.StreamHandler().emit(logging.LogRecord("a", 40, "b", 1, EVIL, None, None))
    sys.excepthook(ValueError, ValueError(EVIL), None)
    for stream in (out, err):
        assert "owned" in stream.getvalue()
        assert not CONTROL.search(stream.getvalue())


def test_logs_that_began_before_are_written_out_too(monkeypatch):
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    handler = logging.StreamHandler()
    logger = logging.getLogger("convt5_test_terminal")
    # pytest sends the logs that it captures to other processes, which take no such text.
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(handler)
    terminal.protect()
    logger.error(EVIL)
    logger.removeHandler(handler)
    assert "owned" in err.getvalue()
    assert not CONTROL.search(err.getvalue())


def without_bar(text: str) -> str:
    """Returns a terminal's text without what tqdm moves its own cursor by."""
    return re.sub(r"\r|\x1b\[A", "", text)


def test_bars_move_the_cursor_and_their_texts_do_not(monkeypatch):
    _, err = in_terminal(monkeypatch)
    shown = progress.Progress(3, label=EVIL)
    shown(1)
    shown.message(EVIL)
    shown.close()
    with progress.elapsed(EVIL):
        pass
    shown = run_log.Progress(num_steps=3, first_step=0, metric=f"validation/{EVIL}")
    shown.record(1, {"loss": 1.0, f"validation/{EVIL}": 1.0, f"task/{EVIL}": 0.5})
    shown.message(EVIL)
    shown.close()
    assert "\r" in err.getvalue()
    assert "owned" in err.getvalue()
    assert not CONTROL.search(without_bar(err.getvalue()))


def test_predictions_in_files_and_pipes_stay_as_they_are(monkeypatch):
    for stream, is_exact in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.protect()
        infer_command._results().write("a\x9bb")
        assert stream.getvalue() == ("a\x9bb" if is_exact else r"a\x9bb")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run whose name, settings and records hold control characters."""
    tiny_run.add_task("terminal_reviews")
    folder = tmp_path_factory.mktemp("terminal") / EVIL.encode(errors="ignore").decode()
    folder.mkdir()
    text = tiny_run.GIN.format(
        vocab=384, run_dir="runs/a", task="terminal_reviews", encoder_length=8, decoder_length=8
    ).replace("batch_size = 4", "batch_size = 8")
    evil = EVIL.encode("unicode_escape", errors="backslashreplace").decode().replace("\\", "\\")
    (folder / "config.gin").write_text(f"{text}trainer.train.run_dir = '{evil}'\n")
    records = [{"step": s, "loss": 1.0 / s, f"validation/{EVIL}": 1.0} for s in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "broken.gin").write_text(f"a = {EVIL}\n", errors="replace")
    return folder


COMMANDS = {
    "train": (train, ["--gin_file={run}/config.gin", "--dry_run"]),
    "train, a broken file": (train, ["--gin_file={run}/broken.gin"]),
    "train, no such file": (train, [f"--gin_file={EVIL}"]),
    "train, no such setting": (train, ["--gin_file={run}/config.gin", f"--gin.{EVIL}=1"]),
    "train, a wrong value": (
        train,
        ["--gin_file={run}/config.gin", f"--gin.trainer.train.mesh={EVIL}"],
    ),
    "train, no such flag": (train, [f"--{EVIL}"]),
    "train, an import": (train, ["--gin_file={run}/config.gin", f"--trust={EVIL}"]),
    "inspect": (inspect, ["--gin_file={run}/config.gin", f"--gin.MODEL_NAME={EVIL}"]),
    "infer": (infer, ["--checkpoint={run}", f"--input={EVIL}"]),
    "compare": (compare, ["{run}", "--output=out"]),
    "compare, no such metric": (compare, ["{run}", f"--metric={EVIL}"]),
    "sweep": (sweep, [f"--gin_file={EVIL}.gin"]),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_lets_a_terminal_be_controlled(run_dir, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    out, err = in_terminal(monkeypatch)
    module, arguments = COMMANDS[command]
    try:
        module.main([argument.replace("{run}", str(run_dir)) for argument in arguments])
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
    shown = out.getvalue() + err.getvalue()
    assert shown
    assert not CONTROL.search(shown)


def test_a_command_in_a_terminal_shows_text_alone(tmp_path):
    """Of a real terminal, in which the program is started as by hand."""
    inside, outside = pty.openpty()
    name = EVIL.encode(errors="surrogateescape")
    process = commands.start(
        [sys.executable, "-m", "convt5.train", b"--gin_file=" + name],
        stdout=outside,
        stderr=outside,
        cwd=tmp_path,
    )
    os.close(outside)
    shown = b""
    while True:
        try:
            part = os.read(inside, 65536)
        except OSError:  # Nobody writes any more.
            break
        if not part:
            break
        shown += part
    os.close(inside)
    assert process.wait() == 2
    assert b"owned" in shown
    text = shown.decode().replace("\r\n", "\n")
    assert not CONTROL.search(text), text
