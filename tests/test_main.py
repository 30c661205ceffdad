"""`convt5` lists the commands and runs each; models, settings and vocabularies are listed truly."""

import ast
import contextlib
import dataclasses
import gzip
import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import signal
import sys

import commands
import pytest
import sentencepiece

import convt5
from convt5 import __main__ as overview
from convt5 import errors
from convt5.analysis import models
from convt5.configuration import catalogue, settings
from convt5.data import vocabulary
from convt5.text import sentinels

PACKAGE = pathlib.Path(convt5.__file__).parent


def test_the_overview_lists_every_command_that_there_is():
    at_the_top = {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    in_rooms = {name: convt5.current_name(f"convt5.{name}") for name in overview.COMMANDS}
    assert at_the_top <= set(in_rooms)
    for name, module in in_rooms.items():
        file = PACKAGE.parent / f"{module.replace('.', '/')}.py"
        assert "command_line.run(main)" in file.read_text(), name
        assert f"  {name} " in overview.overview()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--version"], 0, convt5.__version__),
        ([], 0, "commands:"),
        (["modles"], 2, "Did you mean models?"),
        (["models", "--nmae=t5"], 2, "Did you mean --name?"),
    ],
)
def test_a_command_runs_by_its_name(arguments, code, shown):
    done = commands.run([sys.executable, "-m", "convt5", *arguments])
    assert done.returncode == code
    assert shown in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_lies_in_a_room_has_its_file_as_name_of_the_program():
    """TensorFlow, for one, looks through all of `sys.argv`."""
    spec = importlib.util.find_spec("convt5.vocabulary")
    assert spec is not None
    assert spec.origin == vocabulary.__file__


def test_a_command_that_lies_in_a_room_runs_as_a_module_of_its_name():
    done = commands.run([sys.executable, "-m", "convt5.vocabulary", "--help"])
    assert done.returncode == 0, done.stderr
    assert "usage: python -m convt5.vocabulary" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        # As `uv run convt5` runs it in a checkout.
        ([PACKAGE, "sweep", "--help"], 0, "usage: python -m convt5.sweep"),
        (["-c", "import dataclasses"], 2, "error: Python looks for modules in"),
    ],
)
def test_no_module_of_python_is_hidden_unseen(arguments, code, shown):
    """`inspect` lies in the folder of the package, where Python looks first in both cases."""
    done = commands.run([sys.executable, *arguments], cwd=PACKAGE)
    assert done.returncode == code, done.stderr
    assert shown in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed_with_what_inspect_says_of_them(capsys):
    assert models.main(["--name=*dynamic_tiny", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(listed) == {"dynamic_tiny", "stem_dynamic_tiny"}
    assert listed["dynamic_tiny"]["parameters"] == 5_833_472
    vision = models.describe("vit_c_tiny", models.model_files()["vit_c_tiny"])
    assert vision["parameters"] == 616_106
    assert len(models.model_files()) == len(list(overview_files()))
    with pytest.raises(errors.UserError, match="name='dinamic_tiny' matches none"):
        models.main(["--name=dinamic_tiny"])


def overview_files():
    folder = PACKAGE.parent / "gin" / "models"
    return [*folder.glob("*.gin"), *folder.glob("released/*.gin")]


@pytest.fixture(scope="module")
def every():
    return catalogue.every_setting()


def test_a_number_that_no_float_holds_is_a_fault_of_its_setting(every):
    """Programs that compare it with a float, or convert it, end in an OverflowError."""
    kinds = [getattr(importlib.import_module(x.module), x.name.split(".")[-1]) for x in every]
    tried = 0
    for kind in filter(dataclasses.is_dataclass, kinds):
        parameters = inspect.signature(kind).parameters.values()
        required = {each.name: 1 for each in parameters if each.default is each.empty}
        for each in parameters:
            if re.search(r"\b(int|float)\b", str(each.annotation)):
                tried += 1
                # Descriptions that take it, or refuse another value first, are no concern here.
                with contextlib.suppress(errors.UserError, TypeError, AttributeError):
                    kind(**required | {each.name: 10**400})
    assert tried > 100


def test_every_name_that_a_gin_file_binds_is_in_the_catalogue(every):
    bound = set()
    for path in (PACKAGE.parent / "gin").rglob("*.gin"):
        for line in path.read_text().splitlines():
            name = line.partition(" = ")[0].rpartition("/")[2].strip("\"' ")
            if " = " in line and name.count(".") == 2 and name[:1].isalpha():
                bound.add(name)
    listed = {parameter.name for each in every for parameter in each.parameters}
    assert len(bound) > 100
    assert bound - listed == set()


def test_settings_have_type_default_and_meaning(every):
    by_name = {p.name: p for each in every for p in each.parameters}
    decay = by_name["optimizer.AdafactorConfig.decay_exponent"]
    assert (decay.type, decay.default) == ("float", "0.8")
    assert decay.meaning == "larger forgets more slowly; T5: 0.8."
    kernel = by_name["architecture.StackConfig.kernel_size"]
    assert (kernel.default, kernel.meaning) == ("7", "number of taps K.")
    assert by_name["architecture.ConvT5Config.vocab_size"].default is None
    assert not any(" at 0x" in (p.default or "") for p in by_name.values())
    undocumented = [name for name, p in by_name.items() if not p.meaning]
    assert len(undocumented) < len(by_name) / 4


def test_settings_are_found_by_name_and_by_word(every, monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "every_setting", lambda: every)
    for named in ("cosine", "--name=schedule.Cosine"):
        assert settings.main([named]) == 0
        assert "schedule.Cosine.peak: float   required" in capsys.readouterr().out
    assert settings.main(["--search=label_smoothing"]) == 0
    assert "losses.TextLoss.label_smoothing" in capsys.readouterr().out
    assert settings.main([]) == 0
    text = capsys.readouterr().out
    assert "from convt5.training import optimizer\n  optimizer.AdafactorConfig " in text
    with pytest.raises(errors.UserError, match=r"name='Cosin' .* Did you mean Cosine or "):
        settings.main(["--name=Cosin"])


@pytest.mark.slow
def test_the_package_shows_its_names_and_prints_nothing():
    code = """
import convt5, inspect
assert dir(convt5) == sorted(convt5.__all__)
assert {"load_model", "load_predictor", "ConvT5Config", "UserError"} <= set(dir(convt5))
assert convt5.__version__
assert inspect.signature(convt5.load_model).return_annotation == "ConvT5 | ViT"
assert inspect.signature(convt5.load_predictor).return_annotation is convt5.Predictor
from convt5 import data
data.DataConfig
import convt5.tasks
"""
    done = commands.run([sys.executable, "-c", code], check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(("process", "code"), [(1, 128 + signal.SIGTERM), (2, -signal.SIGTERM)])
def test_the_first_process_of_a_container_can_be_stopped_before_its_command_runs(process, code):
    program = f"""
import os, signal, sys
this = os.getpid()
os.getpid = lambda: {process}
sys.argv = ["convt5"]
import convt5
os.kill(this, signal.SIGTERM)
"""
    assert commands.run([sys.executable, "-c", program]).returncode == code


def test_editors_see_every_lazy_name():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    shown = {
        alias.asname: node.module
        for node in typed
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == convt5._LAZY
    assert (PACKAGE / "py.typed").exists()


WORDS = ("rivers", "run", "slowly", "past", "the", "old", "mill", "while", "children", "sing", "ö")


@pytest.fixture
def text(tmp_path):
    lines = (" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) for i in range(400))
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_a_vocabulary_is_trained_with_t5s_conventions(text, tmp_path, capsys):
    output = tmp_path / "new" / "spm.model"
    arguments = [f"--text={text}", f"--output={output}", "--size=280"]
    assert vocabulary.main(arguments) == 0
    report = capsys.readouterr().out
    assert "280 pieces; on 4 lines held out of training:" in report
    assert "100.00 % of the text is in pieces" in report
    processor = sentencepiece.SentencePieceProcessor(model_file=str(output))
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id()) == (0, 1, 2)
    assert processor.bos_id() == -1
    assert processor.decode(processor.encode("rivers 漢")) == "rivers 漢"
    from convt5.tasks import vocabularies

    loaded = vocabularies.sentencepiece(str(output))
    assert sentinels.ids_of(loaded)[0] == loaded.vocab_size - 1
    before = output.read_bytes()
    with pytest.raises(errors.UserError, match="exists, and models"):
        vocabulary.main(arguments)
    assert output.read_bytes() == before


def test_letters_without_a_piece_are_counted_as_bytes(text):
    class Flags:
        size, lines, coverage = 280, 10**6, 1.0

    lines = vocabulary._Lines(["rivers run slowly"] * 200)
    lines_of = vocabulary._Lines([" ".join(WORDS)] * 200)
    model = vocabulary._train(lines_of, Flags)  # pyright: ignore[reportArgumentType]
    assert not lines.held_out
    measured = vocabulary.measure(model, ["rivers 漢"])
    assert (measured.byte_tokens, measured.num_bytes, measured.words) == (3, 10, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size=90000"], "Vocabulary size too high"),
        (["--size=9"], "size=9 must be above 259"),
        (["--output=spm.bin"], r"output='spm.bin' must end in .model"),
        (["--coverage=2"], "coverage=2.0 must be from 0.9 to 1"),
        (["--lines=0"], "lines=0 must be at least 1"),
        (["--lines=100"], "lines=100 must be at least 101"),
        (["--size=3000000000"], "size=3000000000 and lines=.* must be at most 2,147,483,647"),
        (["--lines=99999999999999999999"], "lines=9+ must be at most"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(text, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UserError, match=message):
        vocabulary.main([f"--text={text}", "--output=spm.model", *flags])
    assert not pathlib.Path("spm.model").exists()


@pytest.mark.parametrize("folder", ["file", "/proc/none"])
def test_a_vocabulary_that_cannot_be_written_is_refused_first(text, tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(vocabulary, "_train", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(errors.UserError, match=rf"output='.*{folder}/a.model' cannot be written"):
        vocabulary.main([f"--text={text}", f"--output={tmp_path / folder / 'a.model'}"])


def test_text_of_more_characters_than_pieces_names_the_flags(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E80))))
    with pytest.raises(errors.UserError, match=r"Increase --size or decrease --coverage\.$"):
        vocabulary.main([f"--text={path}", f"--output={tmp_path / 'spm.model'}", "--size=300"])


def test_text_that_is_no_utf8_ends_with_its_file_and_line(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good\n" + b"\xff\xfe bad\n")
    with pytest.raises(errors.UserError, match=r"bad.txt', line 2 is not UTF-8"):
        vocabulary.main([f"--text={path}", f"--output={tmp_path / 'spm.model'}", "--size=300"])
