"""Commands explain themselves, refuse what they do not understand, and exit as documented."""

import dataclasses
import errno
import importlib
import os
import pathlib
import signal
import subprocess
import sys

import commands
import pytest

from convt5 import errors
from convt5.configuration import command_line
from convt5.runtime import absent_accelerators, xla_flags

IMPORT = "from convt5.configuration import command_line\n"
ROOT = pathlib.Path(__file__).resolve().parents[1]

COMMANDS = [
    *["train", "eval", "infer", "inspect", "bench", "convert", "sweep", "cache"],
    "evaluation.baselines",
]
COMMAND = command_line.Command(
    name="bake",
    summary="Bakes bread.",
    examples=[("a loaf", "--gin_file=loaf.gin --hot")],
    flags=[
        command_line.Flag("hot", "serves it hot.", {"action": "store_true"}),
        command_line.Flag("loaves", "how many.", {"type": int, "default": 1}),
    ],
)


def parse(*argv: str) -> command_line.Arguments:
    return command_line.parse(COMMAND, argv)


def fault(*argv: str) -> str:
    with pytest.raises(errors.UserError) as caught:
        parse(*argv)
    assert caught.value.exit_code == 2
    return str(caught.value)


def start(*argv: str, cwd=ROOT) -> subprocess.CompletedProcess:
    """Runs Python with the package importable from any directory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return commands.run(
        [sys.executable, *argv],
        timeout=120,
        cwd=cwd,
        env=environment,
    )


def test_a_warning_of_convt5_is_a_line_and_others_tell_their_place(tmp_path):
    code = """
import warnings
from convt5.configuration import command_line
ours = compile("import warnings; warnings.warn('odd')", command_line.__file__, "exec")
command_line.run(lambda argv: (exec(ours), warnings.warn("foreign"))[1])
"""
    file = tmp_path / "warn.py"
    file.write_text(code)
    done = start(file)
    assert done.returncode == 0, done.stderr
    line = code.splitlines()[-1]
    assert done.stderr == f"warning: odd\n{file}:5: UserWarning: foreign\n  {line}\n"


def test_files_and_bindings_are_collected_in_order():
    found = parse("--gin_file=a.gin", "--gin.A=1", "--gin_file", "b.gin", "--gin.x/m.C.p=[1, 2]")
    assert found.gin_files == ("a.gin", "b.gin")
    assert found.gin_bindings == ("A=1", "x/m.C.p=[1, 2]")


def test_a_binding_may_be_separated_from_its_value_by_a_space():
    assert parse("--gin_file=a", "--gin.A", "/tmp/x", "--gin.B", "-1").gin_bindings == (
        "A=/tmp/x",
        "B=-1",
    )


def test_only_the_first_equals_sign_separates():
    assert parse("--gin_file=a", "--gin.A=b=c").gin_bindings == ("A=b=c",)


def test_flags_of_the_command_are_parsed():
    flags = parse("--gin_file=a", "--hot", "--loaves=3").flags
    assert (flags.hot, flags.loaves) == (True, 3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gin_fil=a"], ["unknown flag --gin_fil", "Did you mean --gin_file?"]),
        (["--gin_file=a", "--ho"], ["unknown flag --ho", "--hot"]),
        (["--gin_file=a", "--RUN_DIR=x"], ["unknown flag --RUN_DIR", "--gin.RUN_DIR"]),
        (["--gin_file=a", "loaf"], ["unexpected argument 'loaf'"]),
        (["--gin_file=a", "--loaves=many"], ["loaves", "many"]),
        (["--gin_file=a", "--loaves="], ["--loaves is empty; give it a value, or leave it out"]),
        (["--gin_file=a", "--loaves", ""], ["--loaves is empty; give it a value, or leave it out"]),
        (["--gin_file=a", "--gin.A"], ["--gin.A has no value", "--gin.A=VALUE"]),
        (["--gin_file=a", "--gin.A", "--hot"], ["--gin.A has no value"]),
        (["--gin_file"], ["--gin_file"]),
        (["--hot"], ["--gin_file is missing", "--gin_file=loaf.gin"]),
        ([], ["--gin_file is missing"]),
    ],
)
def test_what_is_not_understood_is_explained(argv, words):
    message = fault(*argv)
    assert all(word in message for word in words), message
    assert "python -m convt5.bake --help" in message


def test_help_shows_flags_and_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for words in ("Bakes bread.", "--hot", "--gin.NAME=VALUE", "# a loaf", "exit code"):
        assert words in text
    assert "python -m convt5.bake --gin_file=loaf.gin --hot" in text


@pytest.mark.parametrize("is_needed", [True, False])
def test_the_usage_says_whether_a_gin_file_is_needed(is_needed):
    usage, *_ = dataclasses.replace(COMMAND, needs_gin_file=is_needed).help().splitlines()
    assert ("bake --gin_file=FILE [--gin_file=FILE ...]" in usage) == is_needed
    assert "[--gin_file=FILE ...]" in usage


def test_the_help_of_a_command_without_gin_settings_names_none():
    command = dataclasses.replace(COMMAND, examples=[], needs_gin_file=False, reads_gin=False)
    assert "usage: python -m convt5.bake [flags]" in command.help()
    assert "gin" not in command.help()


def test_help_wins_over_missing_files(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--hot", "-h")
    assert caught.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "eval",
        "infer",
        "inspect",
        "bench",
        "convert",
        "sweep",
        "cache",
        "evaluation.baselines",
    ],
)
def test_every_command_shows_its_help_whatever_else_it_requires(name, capsys):
    command = importlib.import_module(f"convt5.{name}").COMMAND
    with pytest.raises(SystemExit) as ended:
        command_line.parse(command, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m convt5.{name}" in text
    assert all(f"--{flag.name}" in text for flag in command.flags)


@pytest.mark.parametrize(
    ("raised", "code", "printed"),
    [
        ("errors.UserError('broken')", 2, "error: broken\n"),
        ("errors.TrainingError('diverged')", 1, "error: diverged\n"),
        ("KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_errors_of_the_user_are_one_message_and_an_exit_code(raised, code, printed):
    done = start(
        "-c",
        f"from convt5 import errors\n{IMPORT}"
        f"def main(argv): raise {raised}\n"
        "command_line.run(main)",
    )
    assert (done.returncode, done.stderr) == (code, printed)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["-m", "/usr/bin/convt5"])
def test_ctrl_c_leaves_no_traceback_before_and_after_a_command_either(program):
    begin = f"import atexit, os, signal, sys\nsys.argv = [{program!r}]\nimport convt5\n{IMPORT}"
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    in_imports = start("-c", f"{begin}{interrupt}")
    in_command = start("-c", f"{begin}command_line.run(lambda argv: {interrupt})")
    at_exit = f"atexit.register(lambda: {interrupt})\ncommand_line.run(lambda argv: 0)"
    in_exit = start("-c", f"{begin}{at_exit}")
    assert (in_imports.returncode, in_imports.stderr) == (-signal.SIGINT, "")
    assert (in_command.returncode, in_command.stderr) == (130, "interrupted\n")
    assert (in_exit.returncode, in_exit.stderr) == (-signal.SIGINT, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "__import__('interrupted')",
        "Interrupted() and None or time.sleep(600)",
        "wrapped()",
    ],
)
def test_ctrl_c_is_one_line_wherever_it_strikes(tmp_path, command):
    strike = "os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "interrupted.py").write_text(
        f"import os, signal\ntry: {strike}\n"
        "except BaseException: raise ImportError('while initializing the extension')\n"
    )
    code = (
        f"import os, signal, time\n{IMPORT}"
        "class Interrupted:\n"
        f"    def __del__(self): {strike}\n"  # Python prints what is raised there, and goes on.
        "def wrapped():\n"
        f"    try: {strike}\n"
        "    except BaseException: raise RuntimeError('a callback failed')\n"
        f"command_line.run(lambda argv: {command})"
    )
    done = commands.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("program", ["-c", "/usr/bin/other"])
def test_ctrl_c_is_an_exception_in_programs_that_import_convt5(program):
    code = (
        f"import os, signal, sys\nsys.argv = [{program!r}]\nimport convt5\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: print('caught')"
    )
    assert start("-c", code).stdout == "caught\n"


def test_an_ignored_ctrl_c_stays_ignored():
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"sys.argv = ['-m']\nimport convt5\n{IMPORT}"
        "command_line.run(lambda argv: os.kill(os.getpid(), signal.SIGINT))"
    )
    assert start("-c", code).returncode == 0


def test_a_full_disk_is_one_message_wherever_it_is_met():
    # Every write to this device fails for want of room.
    done = start(
        "-c", f"{IMPORT}command_line.run(lambda argv: open('/dev/full', 'w').write('x' * 9999))"
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: nothing more can be written: No space left on device. Free space"
    )
    assert "Traceback" not in done.stderr


def test_that_no_temporary_file_can_be_written_is_told():
    code = f"import tempfile\n{IMPORT}command_line.run(lambda argv: tempfile.gettempdir())"
    done = commands.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, "-c", code])
    assert done.returncode == 1
    assert done.stderr.startswith("error: No usable temporary directory found in [")
    assert "set TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_known_from_other_faults_of_files():
    of_numpy = OSError("25 requested and 0 written")
    named = OSError(errno.EDQUOT, "Disk quota exceeded", "runs/a")
    assert "25 requested" in str(errors.of_full_disk(of_numpy))
    assert "to runs/a: Disk quota exceeded." in str(errors.of_full_disk(named))
    assert errors.of_full_disk(FileNotFoundError(errno.ENOENT, "No such file", "a")) is None
    assert errors.of_full_disk(ValueError("1 requested and 0 written")) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "unread"])
def test_work_goes_on_when_standard_error_cannot_be_written(tmp_path, is_full):
    code = (
        f"import sys\nfrom convt5.runtime import quiet_imports\n{IMPORT}"
        "def main(argv):\n"
        "    with quiet_imports._without_chatter(): pass\n"
        "    for _ in range(99): print('x' * 9999, file=sys.stderr)\n"
        "    open(argv[0], 'w').write('done')\n"
        "command_line.run(main)"
    )
    if is_full:
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    done = commands.run([sys.executable, "-c", code, tmp_path / "result"], stderr=writer)
    os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == "done"


@pytest.mark.parametrize("lacking", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: 8 bytes")])
def test_a_lack_of_memory_is_one_message(lacking, capsys):
    def main(argv):
        raise lacking

    with pytest.raises(SystemExit) as ended:
        command_line.run(main)
    assert ended.value.code == 1
    assert "error: there is too little memory (" in capsys.readouterr().err


@pytest.mark.parametrize("raised", ["1 / 0", "open('absent')"])
def test_defects_keep_their_traceback(raised):
    done = start("-c", f"{IMPORT}command_line.run(lambda argv: {raised})")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_success_exits_with_zero():
    assert start("-c", f"{IMPORT}command_line.run(len)").returncode == 0


def test_texts_are_written_whatever_letters_the_locale_has(tmp_path):
    path = tmp_path / "out"
    code = f"{IMPORT}command_line.run(lambda argv: print('na\\u00efve \\u65e5 \\udcc3'))"
    with path.open("w") as out:
        done = commands.run(
            [sys.executable, "-c", code],
            stdout=out,
            env=dict(os.environ, PYTHONIOENCODING="ascii"),
        )
    assert done.returncode == 0
    assert path.read_bytes() == "na\u00efve \u65e5 \\udcc3\n".encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--gin_fil=gin/runs/quickstart.gin"],
        ["--gin_file=gin/runs/quickstar.gin"],
        ["--gin_file=gin/runs/quickstart.gin", "--gin.NUM_STEP=3"],
    ],
)
def test_help_and_usage_errors_import_no_framework(argv):
    done = start(
        "-c",
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('jax', 'flax', 'tensorflow', 'seqio', 'numpy'):\n"
        "            raise ImportError('refused: ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"sys.argv = ['train', *{argv!r}]\n"
        f"from convt5 import train\n{IMPORT}"
        "command_line.run(train.main)\n",
    )
    assert "refused" not in done.stderr
    assert done.returncode == (0 if argv == ["--help"] else 2)


@pytest.mark.slow
def test_train_runs_as_a_module_from_any_directory(tmp_path):
    done = start(
        "-m", "convt5.train", "--gin_file=gin/runs/quickstart.gin", "--gin.NUM_STEP=3", cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: configuration: --gin.NUM_STEP: macro NUM_STEP=3 is not used by anything; correct "
        "the name or remove it. Did you mean NUM_STEPS?\n"
    )


@pytest.mark.parametrize(
    ("number", "exit_code", "words"),
    [
        (errno.ENAMETOOLONG, 2, "choose a shorter name"),
        (errno.EACCES, 2, "change its permissions"),
        (errno.EROFS, 2, "a path that can be written"),
        (errno.EDQUOT, 1, "Free space"),
        (errno.EFBIG, 1, "ulimit -f"),
    ],
)
def test_what_the_file_system_says_of_a_path_is_the_users(number, exit_code, words):
    told = errors.of_files(OSError(number, os.strerror(number), "runs/a"))
    assert told is not None
    assert told.exit_code == exit_code
    assert "runs/a" in str(told)
    assert words in str(told)


def test_a_full_disk_is_known_from_writers_that_are_not_pythons():
    told = errors.of_full_disk(RuntimeError("IoError: No space left on device (os error 28)"))
    assert "IoError: No space left on device" in str(told)


def test_an_error_about_a_full_disk_exits_with_1_whoever_tells_it():
    code = (
        f"import errno\nfrom convt5 import errors\n{IMPORT}"
        "def main(argv):\n"
        "    try: raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    except OSError as error: raise errors.UserError('output=x is full') from error\n"
        "command_line.run(main)"
    )
    done = start("-c", code)
    assert (done.returncode, done.stderr) == (1, "error: output=x is full\n")


def test_help_that_cannot_be_written_is_told():
    code = f"{IMPORT}command_line.run(lambda argv: command_line.parse(convert.COMMAND, ['-h']))"
    with open("/dev/full", "w") as full:
        done = commands.run(
            [sys.executable, "-c", f"from convt5 import convert\n{code}"], stdout=full
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing more can be written")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_closed_streams_lead_nowhere_and_into_no_file(tmp_path):
    code = (
        f"import os, sys\n{IMPORT}"
        "def main(argv):\n"
        "    with open(argv[0], 'w') as file:\n"
        "        file.write('mine')\n"
        "        print('out'); print('err', file=sys.stderr); os.write(2, b'native')\n"
        "    return len(sys.stdin.read())\n"
        "command_line.run(main)"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    done = commands.run([*command, tmp_path / "file"])
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nonsense", "Unknown flag in XLA_FLAGS: --nonsense"),
        ("nonsense", "Could not open file"),
        ("--xla_cpu_enable_fast_math=maybe", "interpret value maybe for flag xla_cpu_enable"),
    ],
)
def test_flags_that_xla_cannot_read_are_told_before_it_ends_the_process(flags, words):
    with pytest.raises(errors.UserError, match=words) as caught:
        xla_flags.check(os.environ | {"XLA_FLAGS": flags})
    assert str(caught.value).startswith(f"XLA_FLAGS={flags!r} cannot be read")


def test_flags_that_the_project_sets_are_not_tried(monkeypatch):
    monkeypatch.setattr(xla_flags.subprocess, "run", None)
    xla_flags.check({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    xla_flags.check({"XLA_FLAGS": ""})
    xla_flags.check({})


def test_a_platform_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "foo")
    source = "raise RuntimeError(\"Unable to initialize backend 'foo'. (set JAX_PLATFORMS='')\")"
    error = None
    try:
        exec(compile(source, "/lib/jax/_src/xla_bridge.py", "exec"))
    except RuntimeError as raised:
        error = raised
    told = str(absent_accelerators.of_devices(error))
    assert "with JAX_PLATFORMS='foo'" in told
    assert "Unable to initialize backend 'foo'. Set" in told
    assert absent_accelerators.of_devices(RuntimeError("Unable to initialize")) is None


def test_commands_collect_garbage_seldom():
    code = (
        "import gc\nfrom convt5.configuration import command_line\n"
        "command_line.run(lambda _: print(*gc.get_threshold()))"
    )
    done = commands.run([sys.executable, "-c", code])
    assert done.stdout.split() == list(map(str, command_line._COLLECTIONS))


def test_a_bucket_that_cannot_be_reached_is_told():
    from_tensorflow = type("OpError", (Exception,), {"__module__": errors._OF_STORES})
    told = errors.of_files(from_tensorflow("no host\n\t when reading metadata of gs://absent/run"))
    assert told is not None
    assert told.exit_code == 1
    assert str(told).startswith("gs://absent/run cannot be used (no host when reading")
    quoted = errors.of_files(from_tensorflow("no scheme 's3' (file: 's3://b/x.json')"))
    assert str(quoted).startswith("s3://b/x.json cannot be used")
    assert errors.of_files(from_tensorflow("a defect")) is None
    assert errors.of_files(RuntimeError("gs://absent/run")) is None
