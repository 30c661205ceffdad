"""Every command in README and docs is one that there is, with flags and settings that there are.

The shell reads each block of a page, with functions in place of programs that note how they are
called. So loops, variables and line ends are the shell's own, and nothing is run but `cat`.
"""

import functools
import gzip
import importlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import sys

import commands
import convt5.tasks  # Tasks of convt5 are there before those that pages define.
import pytest
import seqio

import convt5
from convt5 import bench, compare, train
from convt5.analysis import inspect_command
from convt5.benchmarks import operators
from convt5.configuration import command_line, gin_config, gin_files
from convt5.sweeps import reading

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```\w*\n# (\w+\.(?:py|gin))\n(.*?)^```", re.DOTALL | re.MULTILINE)
# What a command that no test runs needs: a comment above it, for those up to the end of the block.
NEEDS = re.compile(r"^( *)# Needs (.*?)\.?$", re.MULTILINE)
# Programs of others, and of the shell, which no test of ours can vouch for.
OTHERS = {"pip", "hf", "gcloud", "echo", "mkdir", "mv", "rm", "cd", "ruff", "mkdocs"}
OTHERS |= {"pyright", "pytest", "uv", "bash", "seqio.scripts.cache_tasks_main", "needs"}
NOTED = """
# One write a line: the commands of a pipe note at the same time.
note() { local line; printf -v line '%q ' "$@"; printf '%s\\n' "$line" >> "$NOTES"; }
for name in needs uv python convt5 pip hf gcloud echo mkdir mv rm cd bash \\
    launch/{tpu_vm,slurm}.sh; do
    eval "$name() { note $name \\"\\$@\\"; }"
done
TIMEFORMAT=
"""


def blocks(page: pathlib.Path) -> list[str]:
    """The shell code of a page, without the indentation of a list."""
    found = BLOCK.findall(page.read_text())
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, body in found]


def write_files(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the files that a page shows: blocks that begin with `# name.py` or `# name.gin`."""
    for name, body in FILE.findall(page.read_text()):
        (folder / name).write_text(body)


@functools.cache
def calls(page: pathlib.Path, folder: pathlib.Path) -> list[list[str]]:
    """The commands of a page in their order; files that it writes lie in the folder."""
    notes = folder / "notes"
    notes.touch()
    shell = shutil.which("bash")
    assert shell is not None
    marked = [NEEDS.sub(r"\1needs '\2'", f"needs ''\n{block}") for block in blocks(page)]
    code = NOTED + "\n".join(marked)
    environment = {"PATH": "/usr/bin:/bin", "NOTES": str(notes), "HOME": str(folder)}
    done = commands.run([shell, "-c", code], cwd=folder, env=environment)
    assert done.stderr == "", f"{page}: {done.stderr}"
    return [shlex.split(line) for line in notes.read_text().splitlines()]


def ours(call: list[str]) -> list[str]:
    """A call without what runs it: `uv run --extra plot python -m convt5.sweep` is convt5.sweep."""
    words = list(call)
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words and words[0] == "--extra":
            words = words[2:]
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    elif words[:1] == ["python"]:
        words = words[1:]
    elif words[:1] == ["convt5"]:
        words = [f"convt5.{words[1]}", *words[2:]] if words[1:] else ["convt5"]
    return words


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """A folder in which commands find gin files, and settings of the runs that pages speak of."""
    folder = tmp_path_factory.mktemp("sandbox")
    for name in ("gin", "launch"):
        (folder / name).symlink_to(ROOT / name)
    for run in ("corpus", "lconv_base", "t5_1_1_base"):
        (folder / "runs" / run).mkdir(parents=True)
        config = folder / "runs" / run / "config.gin"
        config.write_text((ROOT / "gin" / "runs" / "quickstart.gin").read_text())
    return folder


@pytest.fixture(autouse=True)
def forgotten_tasks():
    """Tasks and modules that pages define are there for one test alone."""
    tasks, modules = set(seqio.TaskRegistry.names()), set(sys.modules)
    yield
    for name in seqio.TaskRegistry.names() - tasks:
        seqio.TaskRegistry.remove(name)
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


def check_settings(name: str, arguments: command_line.Arguments) -> None:
    """Raises `UserError` for gin files and bindings that do not fit the command."""
    files, bindings = list(arguments.gin_files), list(arguments.gin_bindings)
    if name in ("train", "cache"):
        # A cache needs no run directory.
        statements = gin_files.read_all(files)
        is_needed = name == "cache" and gin_files.is_required(statements, "RUN_DIR")
        bindings = ["RUN_DIR=unused"] * is_needed + bindings
        gin_config.load(files, bindings, roots=["@trainer.train"], supplied=["config_text"])
    elif name == "sweep":
        reading.read(files, bindings)
    elif name == "inspect":
        inspect_command.read_step(files, bindings)
    elif name == "bench":
        bench._models(files, bindings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.slow
def test_commands_of_a_page_have_flags_and_settings_that_there_are(
    page, tmp_path, sandbox, monkeypatch
):
    monkeypatch.chdir(sandbox)
    monkeypatch.syspath_prepend(str(sandbox))
    noted = calls(page, tmp_path)
    write_files(page, sandbox)
    for file in tmp_path.glob("*.gin"):  # Which the shell has written.
        shutil.copy(file, sandbox)
    for call in noted:
        program, *argv = ours(call)
        if program in OTHERS or program == "convt5":
            continue
        if program.startswith("convt5."):
            name = program.removeprefix("convt5.")
            module = importlib.import_module(convt5.current_name(program))
            if name == "compare":
                compare._parser().parse_args(argv)
            elif "..." not in argv:
                flags = argv[: argv.index("--")] if "--" in argv else argv
                check_settings(name, command_line.parse(module.COMMAND, flags))
        elif program in ("-", "-c"):
            continue  # Python in the page itself.
        else:
            assert (ROOT / program).is_file(), call
            assert program.endswith(".py") or os.access(ROOT / program, os.X_OK), call
            if program.startswith("launch/") and "--" in argv:
                of_train = argv[argv.index("--") + 1 :]
                check_settings("train", command_line.parse(train.COMMAND, of_train))


def test_a_command_that_there_is_not_is_found(tmp_path, sandbox, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nfor n in 1 2; do\n  uv run convt5 train \\\n    --gin.N=$n\ndone\n```\n"
    )
    assert calls(page, tmp_path) == [
        ["needs", ""],
        *(["uv", "run", "convt5", "train", f"--gin.N={n}"] for n in "12"),
    ]
    monkeypatch.chdir(sandbox)
    arguments = command_line.parse(
        train.COMMAND,
        ["--gin_file=gin/runs/quickstart.gin", "--gin.trainer.train.num_stepz=1"],
    )
    with pytest.raises(convt5.UserError, match="num_stepz"):
        check_settings("train", arguments)


NOT_HERE = {
    "a GPU",
    "a checkout of T5X",
    "an account of Google Cloud",
    "an hour",
    "data that is not in the repository",
    "hours",
    "minutes",
    "the compiler of GPUs",
    "the compiler of TPUs",
    "the extra beam",
    "the extra torch",
    "the network",
}
"""What keeps a command from being run by a test."""


def cheap(name: str, argv: list[str]) -> list[str]:
    """The arguments of a command that make it end within seconds, whatever it takes otherwise."""
    if name == "sweep":
        of_results = ("--import_", "--export_", "--report_only")
        argv = [word for word in argv if not word.startswith(of_results)]
    if name in ("sweep", "train") and "--dry_run" not in argv:
        return [*argv, "--dry_run"]
    if name == "inspect" and {"--measure", "--prove"} & set(argv):
        argv = [word for word in argv if not word.startswith("--mesh=")]  # See test_proofs.
        sizes = [word for word in SMALL_TEXT if ".ConvT5Config." in word]
        sizes += [f"--gin.architecture.StackConfig.{name}=1" for name in ("num_layers", "dilation")]
        return [*argv, *sizes, "--encoder_length=48", "--decoder_length=16"]
    if name == "bench":
        return [*argv, "--suites=ops", "--lengths=8", "--repeats=1"]
    return argv


def is_dry_study(program: str, argv: list[str]) -> bool:
    """Returns whether a command is, made cheap, the dry run that test_sweep makes of each study."""
    settings = [word for word in argv if not word.startswith("--processes=")]
    known = [f"--gin_file=gin/studies/{path.name}" for path in (ROOT / "gin/studies").glob("*.gin")]
    known.remove("--gin_file=gin/studies/paper.gin")
    return program == "convt5.sweep" and len(settings) == 1 and settings[0] in known


def make_runs() -> None:
    """Trains the runs that pages speak of as their reader's."""
    shutil.rmtree("runs/corpus")
    for file, folder in (("quickstart", "runs/corpus"), ("digits", "runs/digits/vit_c_tiny")):
        argv = [f"--gin_file=gin/runs/{file}.gin", f"--gin.RUN_DIR={folder}"]
        assert train.main(small("train", argv)) == 0


def unmarked(page: pathlib.Path, folder: pathlib.Path) -> list[list[str]]:
    """The commands of a page that a test must run: ours, without a mark of what they need."""
    found, needed = [], ""
    for call in calls(page, folder):
        if call[0] == "needs":
            needed = call[1]
            assert not needed or set(needed.split(", ")) <= NOT_HERE, f"{page}: {needed}"
        elif not needed and ours(call)[0] not in OTHERS and "..." not in call:
            found.append(call)
    return found


def test_a_mark_covers_the_rest_of_its_block(tmp_path):
    blocks = ["convt5 models\n# Needs the network.\nhf download x\nconvt5 infer\n", "convt5 eval\n"]
    (page := tmp_path / "page.md").write_text("".join(f"```bash\n{b}```\n" for b in blocks))
    found = unmarked(page, tmp_path)
    assert found == [["convt5", "models"], ["convt5", "eval"]]
    (page := tmp_path / "other.md").write_text("```bash\n# Needs patience\nconvt5 eval\n```\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AssertionError, match="patience"):
        unmarked(page, tmp_path / "folder")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
def test_commands_of_other_pages_are_run_or_say_what_they_need(
    sandbox, tmp_path, monkeypatch, capsys
):
    """Those of guides are run by a test of their own, as a visitor runs them."""
    monkeypatch.chdir(sandbox)
    monkeypatch.setattr(operators, "KERNEL_SIZES", (3,))  # See test_gpu_report.
    make_runs()
    run = set()
    for number, page in enumerate(PAGES):
        (folder := tmp_path / str(number)).mkdir()
        for call in unmarked(page, folder):
            program, *argv = ours(call)
            if any("my_mixer" in word for word in argv):
                continue  # test_own_mixers runs them.
            if str(page.relative_to(ROOT)) in GUIDES:
                assert program != "launch/tpu_vm.sh", call
                assert not any(word.startswith("--topology=") for word in argv), call
                continue
            if program.startswith("launch/"):
                argv = argv if "--dry_run" in argv else ["--dry_run", *argv]
                interpreter = "bash" if program.endswith(".sh") else sys.executable
                done = commands.run([interpreter, ROOT / program, *argv], cwd=ROOT)
                assert done.returncode == 0, (call, done.stderr)
            elif (key := (program, *argv)) not in run and not is_dry_study(program, argv):
                run.add(key)
                module = importlib.import_module(convt5.current_name(program))
                code = module.main(cheap(program.removeprefix("convt5."), argv))
                assert not code, (call, capsys.readouterr())
    assert len(run) >= 20


GUIDES = ["README.md"] + [
    f"docs/guides/{name}.md"
    for name in ("pretraining", "fine_tuning", "predicting", "images", "tasks")
]
SMALL_TEXT = [
    "--gin.trainer.train.eval_num_batches=1",
    *(f"--gin.architecture.ConvT5Config.{name}=8" for name in ("emb_dim", "mlp_dim")),
    *(f"--gin.architecture.ConvT5Config.{name}=2" for name in ("num_heads", "head_dim")),
    # One layer is compiled in a third of the time of four.
    *(f"--gin.architecture.StackConfig.{name}=1" for name in ("num_layers", "kernel_size")),
]
SMALL_BATCHES = "--gin.data.DataConfig.batch_size=8"
REVIEWS = [
    {"text": f"a {word} film {i}", "label": label}
    for i in range(8)
    for word, label in ({"fine": "positive", "dull": "negative"}).items()
]


def small(name: str, argv: list[str]) -> list[str]:
    """The arguments of a command that make it end within seconds; the page's own come first."""
    if name == "train":
        steps = 4 if "--gin_file=adapt.gin" in argv else 2  # Two are done there already.
        argv = [*argv, f"--gin.NUM_STEPS={steps}"]
        if "--gin_file=gin/runs/digits.gin" in argv:
            return [
                *argv,
                "--gin.trainer.train.eval_num_batches=1",
                "--gin.images.ImageDataConfig.batch_size=8",
                "--gin.architecture.ViTConfig.num_layers=1",
                "--gin.schedule.Cosine.warmup_steps=1",
            ]
        argv = [*argv, *SMALL_TEXT]
        return argv if "--gin.CACHE=corpus/cache" in argv else [*argv, SMALL_BATCHES]
    if name == "models":
        return [*argv, "--name=*_tiny"]
    if name == "vocabulary":
        return [*argv, "--size=400"]
    if name == "cache":
        return [*argv, "--rows=64"]
    return argv


STORY = (
    "The bank was founded in 1694 by some merchants of the city. "
    "It moved to larger rooms in 1709 because the winter was cold."
)


@pytest.fixture
def visitor(sandbox, monkeypatch):
    """The sandbox with the text, the labels and the questions that guides speak of."""
    texts = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("data", "scale", "vision")]
    for name in ("corpus", "data/sst2", "data/squad"):
        (sandbox / name).mkdir(parents=True)
    shutil.rmtree(sandbox / "runs")
    with gzip.open(sandbox / "corpus" / "text.txt.gz", "wt") as file:
        # Documents that give questions of each kind, in each split.
        file.write("\n\n".join([*texts, *[STORY] * 300]))
    for split in ("train", "dev", "test"):
        lines = "".join(f"{json.dumps(review)}\n" for review in REVIEWS)
        (sandbox / "data" / "sst2" / f"{split}.jsonl").write_text(lines)
        asked = {"question": "When was the bank founded?", "context": STORY, "answers": ["1694"]}
        (sandbox / "data" / "squad" / f"{split}.jsonl").write_text(f"{json.dumps(asked)}\n" * 8)
    (sandbox / "reviews.jsonl").write_text(json.dumps({"review": "a fine film"}) + "\n")
    for name in ("reviews", "reviews_dev"):
        (sandbox / f"{name}.tsv").write_text("a fine film\tgood\na dull film\tbad\n" * 8)
    monkeypatch.chdir(sandbox)
    monkeypatch.syspath_prepend(str(sandbox))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a fine film\n")))
    return sandbox


# Commands of guides that need what is not here, or that another test runs.
ELSEWHERE = {
    "launch/tpu_vm.sh": "Cloud TPU",
    "launch/local.py": "two processes: test_launch_local",
    "--topology=": "the compilers of TPUs and GPUs: test_tpu_compiler, test_gpu_costs",
}


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
def test_a_visitor_follows_the_guides(visitor, tmp_path, capsys):
    """Everything that README and guides say, in their order, as small as it goes."""
    count = 0
    for name in GUIDES:
        page = ROOT / name
        folder = tmp_path / page.stem
        folder.mkdir()
        noted = calls(page, folder)
        write_files(page, visitor)
        for file in folder.glob("*.gin"):
            shutil.copy(file, visitor)
        for call in noted:
            program, *argv = ours(call)
            if program in OTHERS or any(word in " ".join(call) for word in ELSEWHERE):
                continue
            module = importlib.import_module(convt5.current_name(program))
            if program == "convt5":
                continue  # test_main lists the commands.
            code = module.main(small(program.removeprefix("convt5."), argv))
            assert not code, (call, capsys.readouterr())
            count += 1
    assert count >= 20
    assert json.loads((visitor / "predictions.jsonl").read_text())["label"] in (
        "positive",
        "negative",
    )
