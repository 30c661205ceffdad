"""To use a model is to read data: settings that come with one run no code, wherever they lie.

Every trap would write a file, `sprung`, if something that it holds ran. `TRAPS` are settings,
`ENTRANCES` the ways in which convt5 is given them.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import types
from collections.abc import Callable

import commands
import jax
import pytest
import tiny_run
from convt5.tasks import sources

import convt5
from convt5 import bench, cache, convert, errors, eval, infer, inspect, sweep, train
from convt5.configuration import gin_config, gin_files, trust
from convt5.configuration.gin_names import Resolver, Target
from convt5.interchange import portable
from convt5.modeling.tree_paths import named_leaves
from convt5.runtime import tfds_features
from convt5.sweeps import reading
from convt5.vision import sources as images

ROOT = pathlib.Path(__file__).resolve().parents[1]
TASK = "trust_reviews"
HEAD = "from __gin__ import dynamic_registration\n"
# Settings that would run something; {sprung} is the file that would appear.
TRAPS = {
    "import": "import {evil}\n",
    "import of a name": "from {evil} import anything\n",
    "import of a dotted name": "import {evil}.anything\n",
    "import under a name of ours": "import {evil} as architecture\n",
    "import under another of ours": "from {evil} import anything as trainer\n",
    "import that looks like ours": "import convt5_{evil}\n",
    "import of tasks that are not ours": "from tasks import pretraining\n",
    "call of the standard library": "import subprocess\n"
    "data.DataConfig.split = @subprocess.getoutput()\n"
    "subprocess.getoutput.cmd = 'touch {sprung}'\n",
    "call that replaces a setting": "import os\n"
    "trainer.train.seed = @os.system()\nos.system.command = 'touch {sprung}'\n",
    "call in a macro": "import os\nMODEL_NAME = @os.system()\n"
    "os.system.command = 'touch {sprung}'\n",
    "call in a list": "import pathlib\ntrainer.train.frozen = [@pathlib.Path.touch()]\n"
    "pathlib.Path.touch.self = '{sprung}'\n",
    "call behind a module of ours": "from convt5 import inspect\n"
    "data.DataConfig.split = @inspect.os.system()\n"
    "inspect.os.system.command = 'touch {sprung}'\n",
    "call behind two modules": "from convt5.training import run_log\n"
    "data.DataConfig.split = @run_log.os.system()\n"
    "run_log.os.system.command = 'touch {sprung}'\n",
    "what a module of ours took in": "from convt5 import inspect\n"
    "data.DataConfig.split = @inspect.json.dump()\n",
    "method of a class": "from convt5.text.vocabulary_files import os\n",
    "function that writes": "from convt5.runtime import atomic_files\n"
    "data.DataConfig.split = @atomic_files.replace_text()\n"
    "atomic_files.replace_text.path = '{sprung}'\natomic_files.replace_text.text = ''\n",
    "function that loads by name": "from convt5.configuration import gin_names\n"
    "data.DataConfig.split = @gin_names.importlib.import_module()\n",
    "loading of another module": "from convt5.configuration import gin_names\n"
    "data.DataConfig.split = @gin_names.Target.load()\n",
    "training while settings are read": "trainer.train.seed = @inner/trainer.train()\n"
    "inner/trainer.train.run_dir = '{sprung}'\ninner/trainer.train.seed = 0\n",
    "include of a file beside it": "include 'more.gin'\n",
    "include of a file above it": "include '{above}'\n",
}
# What an include finds: a file that would be the user's own, were it not asked for from here.
INCLUDED = f"{HEAD}import {{evil}}\n"
EVIL = "import pathlib\npathlib.Path({sprung!r}).touch()\nanything = print\n"


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder of the user's, in which a stranger's model lies."""

    folder: pathlib.Path
    run: pathlib.Path
    export: pathlib.Path
    sprung: pathlib.Path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A run and an export of the same tiny model."""
    tiny_run.add_task(TASK)
    folder = tmp_path_factory.mktemp("models")
    run = pathlib.Path(tiny_run.write_run(folder / "run", steps=(20,), task=TASK))
    config = run / "config.gin"
    # A row for each of the devices.
    config.write_text(config.read_text().replace("batch_size = 4", "batch_size = 8"))
    model = tiny_run.make_model(20)
    (run / "texts").write_text("a film\n")
    (folder / "export").mkdir()
    params = {name: jax.device_get(leaf) for name, leaf in named_leaves(model)}
    portable.write_model(folder / "export", model.config, params)
    return run, folder / "export"


@pytest.fixture
def place(models, tmp_path, monkeypatch):
    """Copies of the models; a module `evil` can be imported, and would be noticed."""
    sprung = tmp_path / "sprung"
    library = tmp_path / "library"
    for name in ("evil", "convt5_evil"):
        (library / name).mkdir(parents=True)
        (library / name / "__init__.py").write_text(EVIL.format(sprung=str(sprung)))
    monkeypatch.syspath_prepend(str(library))
    folder = tmp_path / "user"
    folder.mkdir()
    for source in models:
        shutil.copytree(source, folder / source.name)
    monkeypatch.chdir(folder)
    yield Place(folder, folder / "run", folder / "export", sprung)
    forget()


def forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("evil", "convt5_evil", "mine")]:
        del sys.modules[name]


def set_trap(place: Place, kind: str, file: pathlib.Path) -> None:
    """Adds a trap to the settings in a file."""
    above = place.folder / "above.gin"
    values = {"evil": "evil", "sprung": place.sprung, "above": above}
    for other in (file.parent / "more.gin", above):
        other.write_text(INCLUDED.format(**values))
    text = file.read_text() if file.exists() else f"{HEAD}from convt5 import data\n"
    file.write_text(TRAPS[kind].format(**values) + text)


def use(main: Callable, *arguments: str) -> Callable[[Place], object]:
    def call(place: Place) -> object:
        paths = {"run": place.run, "export": place.export, "folder": place.folder}
        return main([argument.format(**paths) for argument in arguments])

    return call


def import_results(place: Place) -> object:
    """A study whose file came with its results."""
    study = place.run / "study.gin"
    text = (place.run / "config.gin").read_text()
    study.write_text(text + "from convt5 import sweeps\nsweeps.Study.output_dir = 'study'\n")
    (place.run / "other.jsonl").write_text("")
    arguments = [f"--gin_file={study}", f"--import_results={place.run / 'other.jsonl'}"]
    return sweep.main([*arguments, "--report_only"])


def study_of_the_run(place: Place) -> object:
    """A study of the user's own, whose runs have the settings of a stranger."""
    (place.folder / "study.gin").write_text(
        f"{HEAD}from convt5 import sweeps\nsweeps.Study.output_dir = 'study'\n"
        f"sweeps.Study.gin_files = ['{place.run}/config.gin']\n"
        "sweeps.Study.grids = [@sweeps.Grid()]\nsweeps.Study.rows = ['trainer.train.seed']\n"
        "sweeps.Grid.axes = {'trainer.train.seed': [1]}\n"
        "sweeps.Study.seed_name = 'trainer.train.x'\n"
    )
    return sweep.main(["--gin_file=study.gin", "--dry_run"])


def own_file_that_includes(place: Place) -> object:
    (place.folder / "mine.gin").write_text(f"include '{place.run}/config.gin'\n")
    return train.main(["--gin_file=mine.gin", "--dry_run"])


def through_a_link(place: Place) -> object:
    (place.folder / "mine.gin").symlink_to(place.run / "config.gin")
    return train.main(["--gin_file=mine.gin", "--dry_run"])


def through_a_link_of_the_run(place: Place) -> object:
    """What the user names is a link, and so is what it leads to."""
    (place.folder / "beside").mkdir()
    (place.run / "config.gin").rename(place.folder / "beside" / "settings.gin")
    (place.run / "config.gin").symlink_to("../beside/settings.gin")
    return through_a_link(place)


def beside_a_model_of_pytorch(place: Place) -> object:
    (place.folder / "hub" / "more").mkdir(parents=True)
    (place.folder / "hub" / "pytorch_model.bin").write_bytes(b"")
    shutil.copy(place.run / "config.gin", place.folder / "hub" / "more" / "settings.gin")
    return train.main(["--gin_file=hub/more/settings.gin", "--dry_run"])


def below_the_run(place: Place) -> object:
    (place.run / "more").mkdir()
    shutil.copy(place.run / "config.gin", place.run / "more" / "settings.gin")
    return train.main([f"--gin_file={place.run}/more/settings.gin", "--dry_run"])


def under_another_name(place: Place) -> object:
    shutil.copy(place.run / "config.gin", place.run / "settings.gin")
    (place.run / "config.gin").unlink()
    return train.main([f"--gin_file={place.run}/settings.gin", "--dry_run"])


CONFIG = "--gin_file={run}/config.gin"
RUN = "--checkpoint={run}"
ENTRANCES = {
    "train": use(train.main, CONFIG, "--dry_run"),
    "train, to go on": use(train.main, CONFIG),
    "train, an included file": own_file_that_includes,
    "train, a linked file": through_a_link,
    "train, a linked file that is a link": through_a_link_of_the_run,
    "train, a file beside a model of PyTorch": beside_a_model_of_pytorch,
    "train, a file of another name": under_another_name,
    "train, a file below the run": below_the_run,
    "eval": use(eval.main, RUN, "--dry_run"),
    "eval of a step": use(eval.main, "--checkpoint={run}/checkpoints/20", "--dry_run"),
    "eval of all steps": use(eval.main, "--checkpoint={run}/checkpoints", "--dry_run"),
    "eval of a named task": use(eval.main, RUN, f"--task={TASK}", "--dry_run"),
    "eval by the settings": use(eval.main, CONFIG, "--dry_run"),
    "infer": use(infer.main, RUN, "--input={run}/texts", "--dry_run"),
    "infer with a vocabulary": use(
        infer.main, RUN, "--vocabulary=bytes", "--input={run}/texts", "--dry_run"
    ),
    "inspect": use(inspect.main, CONFIG),
    "inspect, paired": use(
        inspect.main, f"--gin_file={ROOT}/gin/models/t5_tiny.gin", "--pair_with={run}/config.gin"
    ),
    "bench": use(bench.main, CONFIG, "--suites=train_step"),
    "cache": use(cache.main, CONFIG, "--output_dir={folder}/cache"),
    "convert, the vocabulary of a run": use(
        convert.main,
        RUN,
        "--to=safetensors",
        "--vocabulary={run}",
        "--output_dir={folder}/converted",
    ),
    "sweep": use(sweep.main, CONFIG, "--dry_run"),
    "sweep, imported results": import_results,
    "sweep, settings of its runs": study_of_the_run,
    "load_predictor": lambda place: convt5.load_predictor(place.run),
    "load_predictor with a vocabulary": lambda place: convt5.load_predictor(
        place.run, vocabulary="bytes"
    ),
    "load_vocabulary": lambda place: convt5.load_vocabulary(place.run),
}


def refused(place: Place, enter: Callable[[Place], object]) -> str:
    """Returns the message with which a trap is refused, unsprung."""
    with pytest.raises(errors.UserError) as caught:
        enter(place)
    assert not place.sprung.exists()
    assert "evil" not in sys.modules
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_settings_that_came_with_a_model_import_nothing(place, entrance):
    set_trap(place, "import", place.run / "config.gin")
    message = refused(place, ENTRANCES[entrance])
    assert ".gin:1: import evil" in message
    assert "--trust=evil" in message


@pytest.mark.parametrize("kind", TRAPS)
def test_settings_that_came_with_a_model_run_nothing(place, kind):
    set_trap(place, kind, place.run / "config.gin")
    message = refused(place, ENTRANCES["train"])
    assert "--trust=" in message or "there is no module" in message, message
    with contextlib.suppress(errors.UserError):  # Here a message may be all.
        ENTRANCES["load_predictor"](place)
    assert not place.sprung.exists()


def test_the_settings_of_a_run_need_no_trust(place):
    for name in ("train", "eval", "infer", "inspect", "load_predictor"):
        ENTRANCES[name](place)


@pytest.mark.parametrize("beside", [".", "..", "../.."], ids=["beside", "above", "far"])
def test_an_exported_model_is_used_without_the_settings_around_it(place, beside):
    (place.folder / "deep").mkdir()
    export = place.folder / "deep" / "export"
    shutil.move(place.export, export)
    set_trap(place, "import", export / beside / "config.gin")
    if beside == ".":
        refused(place, lambda _: convt5.load_predictor(export, vocabulary="bytes"))
    else:
        convt5.load_predictor(export, vocabulary="bytes")
    convt5.load_model(export)
    assert not place.sprung.exists()


def test_a_module_is_trusted_by_name(place):
    config = place.run / "config.gin"
    config.write_text(f"import evil\n{config.read_text()}")
    for name in ("good", "evil,good", "evi", "evil.anything"):
        if name != "evil,good":
            refused(place, use(train.main, CONFIG, "--dry_run", f"--trust={name}"))
    train.main([f"--gin_file={config}", "--dry_run", "--trust=good,evil"])
    assert place.sprung.exists()
    forget()
    place.sprung.unlink()
    convt5.load_predictor(place.run, trust=["evil"])
    assert place.sprung.exists()


def test_a_gin_file_of_the_users_own_trusts_what_it_imports(place):
    config = place.run / "config.gin"
    config.write_text(f"import evil\n{config.read_text()}")
    (place.folder / "mine.gin").write_text("import evil\n")
    eval.main([f"--checkpoint={place.run}", "--gin_file=mine.gin", "--dry_run"])
    assert place.sprung.exists()


def test_a_trusted_module_lends_nothing_that_it_imported(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))
    mine = sys.modules["mine"]
    exec(
        "import os, shutil\ndef split():\n    return 'validation'\nclass A:\n    b = split",
        vars(mine),
    )
    config = place.run / "config.gin"
    text = config.read_text()
    for name in ("os.system", "os.path.join", "shutil.rmtree", "missing"):
        config.write_text(f"import mine\n{text}data.DataConfig.num_epochs = @mine.{name}()\n")
        refused(place, use(train.main, CONFIG, "--dry_run", "--trust=mine"))
    for name in ("split", "A.b"):
        config.write_text(f"import mine\n{text}data.DataConfig.split = @mine.{name}()\n")
        train.main([f"--gin_file={config}", "--dry_run", "--trust=mine"])


@pytest.mark.parametrize("where", ["run", "run/checkpoints"])
def test_a_trusted_name_is_not_that_of_a_module_that_came_with_the_model(place, monkeypatch, where):
    config = place.run / "config.gin"
    config.write_text(f"import planted\n{config.read_text()}")
    (place.folder / where / "planted.py").write_text(EVIL.format(sprung=str(place.sprung)))
    monkeypatch.syspath_prepend(str(place.folder / where))
    message = refused(place, use(train.main, CONFIG, "--dry_run", "--trust=planted"))
    assert "PYTHONPATH" in message


OF_EXPORTS = {
    "eval": (eval.main, f"--task={TASK}", "--dry_run"),
    "infer": (infer.main, "--vocabulary=bytes", "--input=run/texts", "--dry_run"),
    "convert": (convert.main, "--from=safetensors", "--to=stablehlo", "--output_dir=converted"),
}


@pytest.mark.parametrize("entrance", OF_EXPORTS)
def test_the_module_of_a_mixing_kind_is_imported_only_if_it_is_trusted(
    place, monkeypatch, entrance
):
    file = place.export / portable.DESCRIPTION
    about = json.loads(file.read_text())
    about["model"]["encoder"]["mixing"] = {"kind": "unheard", "module": "evil", "settings": {}}
    file.write_text(json.dumps(about))
    main, *arguments = OF_EXPORTS[entrance]
    enter = use(main, "--checkpoint={export}", *arguments)
    trusting = use(main, "--checkpoint={export}", "--trust=evil", *arguments)
    for each in (enter, lambda place: convt5.load_model(place.export)):
        assert "kind 'unheard' is defined in the module evil" in refused(place, each)
    with pytest.raises(errors.UserError, match="kind 'unheard' is defined in the module evil"):
        trusting(place)  # Which does not define it.
    assert place.sprung.exists()
    place.sprung.unlink()
    forget()
    shutil.move(place.folder.parent / "library" / "evil", place.export / "evil")
    monkeypatch.syspath_prepend(str(place.export))
    assert "may have come with that model" in refused(place, trusting)


@pytest.mark.parametrize("name", ["", "a b", "os;", "../x", "a..b", "-"])
def test_what_is_trusted_must_be_a_module(place, name):
    message = refused(place, use(train.main, CONFIG, "--dry_run", f"--trust={name}"))
    assert "must name a module" in message
    message = refused(place, lambda _: convt5.load_predictor(place.run, trust="evil"))
    assert "trust=['my_tasks']" in message


def test_a_run_goes_on_by_the_users_own_file_and_is_used_by_naming_the_module(place, monkeypatch):
    (place.folder / "my_tasks_here.py").write_text("")
    monkeypatch.syspath_prepend(str(place.folder))
    text = (place.run / "config.gin").read_text()
    (place.folder / "my_run.gin").write_text(f"import my_tasks_here\n{text}")
    train.main(["--gin_file=my_run.gin", "--dry_run"])
    config = gin_config.load(["my_run.gin"], roots=["@trainer.train"], supplied=["config_text"])
    (place.run / "config.gin").write_text(config.text)
    message = refused(place, ENTRANCES["eval"])
    assert "--trust=my_tasks_here" in message
    eval.main([f"--checkpoint={place.run}", "--dry_run", "--trust=my_tasks_here"])
    del sys.modules["my_tasks_here"]


def test_every_setting_that_files_of_convt5_name_may_come_from_anybody():
    for path in sorted((ROOT / "gin").rglob("*.gin")):
        statements = [
            dataclasses.replace(s, location=dataclasses.replace(s.location, is_own=False))
            for s in gin_files.read_all([str(path)])
        ]
        imports = [s for s in statements if isinstance(s, gin_files.Import)]
        trusts = trust.Trust((), imports)
        trusts.check_imports(imports)
        resolver = Resolver(imports)
        bindings = [s for s in statements if isinstance(s, gin_files.Binding)]
        trusts.check_targets([resolver.setting(s) for s in bindings])


@pytest.mark.parametrize("name", sorted(trust.FUNCTIONS | trust.CLASSES | trust.PROGRAMS))
def test_what_is_listed_exists(name):
    module, _, last = name.rpartition(".")
    found = trust._found(Target(module, last))
    assert trust._full_name(found) == name


@pytest.mark.parametrize(
    ("name", "is_setting"),
    [
        ("tasks.pretraining.text_span_corruption", True),
        ("tasks.denoising.ul2", True),
        ("tasks.vocabularies.characters", True),
        ("tasks.metrics.accuracy", True),
        ("tasks.tables.read_rows", False),
        ("runtime.local_files.open_bytes", False),
        ("tasks.pretraining.seqio", False),
        ("architecture.StackConfig", True),
        ("generation.search.BeamSearch", True),
        ("trainer.train", False),
        ("loading.load_model", False),
        ("checkpoint.Checkpointer", False),
        ("training.run_log.WeightsAndBiases", False),
        ("runtime.atomic_files.replacing", False),
        ("sweeps.running.run_all", False),
        ("configuration.command_line.run", False),
    ],
)
def test_descriptions_and_tasks_are_settings_and_what_does_something_is_none(name, is_setting):
    module, _, last = f"convt5.{name}".rpartition(".")
    assert trust.is_setting(trust._found(Target(module, last))) == is_setting


def test_the_working_directory_hides_no_module(tmp_path):
    """What lies in the current folder comes last where a command looks for modules."""
    sprung = tmp_path / "sprung"
    for name in ("jax", "gin", "json", "etils", "numpy", "readline"):
        (tmp_path / f"{name}.py").write_text(EVIL.format(sprung=str(sprung)))
    (tmp_path / "my_own.py").write_text("")
    ran = commands.run(
        [sys.executable, "-m", "convt5.train", "--gin_file=a.gin"],
        cwd=tmp_path,
        env={name: v for name, v in os.environ.items() if name != "PYTHONSAFEPATH"},
    )
    assert ran.returncode == 2, ran.stderr
    assert not sprung.exists()


def test_the_settings_of_a_results_file_are_compared_and_never_read_as_gin(place):
    place.folder.joinpath("study.gin").write_text(
        f"{HEAD}from convt5 import sweeps\nsweeps.Study.output_dir = 'study'\n"
        "sweeps.Study.gin_files = ['gin/runs/digits.gin']\n"
        "sweeps.Study.grids = [@sweeps.Grid()]\nsweeps.Study.rows = ['NUM_STEPS']\n"
        "sweeps.Grid.axes = {'NUM_STEPS': [1]}\n"
    )
    study = reading.read(["study.gin"])
    (point,) = study.points()
    settings = {"gin_files": ["evil.gin"], "bindings": ["x=@os.system()"]}
    line = {
        "run": point.name,
        "about": {"settings": settings, "status": "finished", "message": ""},
        "records": [{"step": 1}],
    }
    (place.folder / "results.jsonl").write_text(json.dumps(line) + "\n")
    arguments = ["--gin_file=study.gin", "--import_results=results.jsonl", "--report_only"]
    assert "run of other settings" in refused(place, use(sweep.main, *arguments))


CALL = {
    "trainer.train.eval_every_steps": "@sweeps.running.subprocess.getoutput()",
    "sweeps.running.subprocess.getoutput.cmd": "touch {sprung}",
}


def study_with(place, **settings) -> pathlib.Path:
    """A study of a stranger, beside the run that came with it."""
    study = {
        "output_dir": "study",
        "gin_files": ["gin/runs/digits.gin"],
        "rows": ["NUM_STEPS"],
        "metric": "validation/accuracy",
        "perfect": 100.0,
        **settings,
    }
    axes = study.pop("axes", {"NUM_STEPS": [1]})
    file = place.run / "study.gin"
    file.write_text(
        f"{HEAD}from convt5 import sweeps\nsweeps.Grid.axes = {axes!r}\n"
        "sweeps.Study.grids = [@sweeps.Grid()]\n"
        + "".join(f"sweeps.Study.{name} = {value!r}\n" for name, value in study.items())
    )
    return file


def paper_with(place, study: pathlib.Path, **settings) -> pathlib.Path:
    """A paper of a stranger with one study."""
    paper = {"page": "page.md", "title": "Paper", **settings}
    paper.setdefault("studies", {"one": {"gin_file": str(study)}})
    file = place.run / "paper.gin"
    file.write_text(
        f"{HEAD}from convt5 import sweeps\n"
        "sweeps.Paper.questions = [@sweeps.Question()]\nsweeps.Question.title = 'Which?'\n"
        "sweeps.Question.claims = [@sweeps.CostClaim()]\nsweeps.CostClaim.text = 'Less.'\n"
        "sweeps.CostClaim.first = 'a'\nsweeps.CostClaim.second = 'b'\n"
        + "".join(f"sweeps.Paper.{name} = {value!r}\n" for name, value in paper.items())
    )
    return file


@pytest.mark.parametrize("setting", ["bindings", "axes", "first_stage", "paper"])
def test_settings_of_a_study_that_came_with_a_model_run_nothing(place, setting):
    call = {name: value.format(sprung=place.sprung) for name, value in CALL.items()}
    if setting == "paper":
        reference, command = call.items()
        of_study = dict([("sweeps.Study.metric", reference[1]), command])
        studies = {"one": {"gin_file": str(study_with(place)), **of_study}}
        file = paper_with(place, place.run / "study.gin", studies=studies)
    elif setting == "axes":
        file = study_with(place, axes={"NUM_STEPS": {"1": call}})
    else:
        file = study_with(place, **{setting: call})
    message = refused(place, use(sweep.main, f"--gin_file={file}", "--dry_run"))
    assert "subprocess.getoutput" in message
    assert "is not a setting of convt5" in message
    own = place.folder / "own"
    own.mkdir()
    shutil.move(file, own / file.name)
    with contextlib.suppress(errors.UserError):
        sweep.main([f"--gin_file={own / file.name}", "--dry_run"])
    assert place.sprung.exists()


def test_references_of_a_study_that_came_with_a_model_may_be_settings(place):
    schedule = {"trainer.train.schedule": "@schedule.Constant()", "schedule.Constant.rate": 0.1}
    file = study_with(place, bindings=schedule)
    sweep.main([f"--gin_file={file}", "--dry_run"])


@pytest.mark.parametrize("flag", ["trust", "t5x", "gin.MODEL", "t5x=folder"])
def test_a_paper_that_came_with_a_model_gives_the_benchmark_no_modules(place, flag):
    file = paper_with(place, study_with(place), bench={flag: "evil"})
    message = refused(place, use(sweep.main, f"--gin_file={file}", "--dry_run"))
    assert f"bench has {flag!r}" in message


@pytest.mark.parametrize("name", ["huggingface:mnist/x:1.0.0", "kaggle:mnist:1.0.0", "a:b"])
def test_a_data_set_of_tfds_is_not_one_whose_code_is_downloaded(name):
    with pytest.raises(errors.UserError, match="would download and run"):
        sources.PreparedTfdsSource(name, None)
    with pytest.raises(errors.UserError, match="would download and run"):
        images.Tfds(name=name).open("train")


@pytest.mark.parametrize("key", ["type", "pythonClassName", "t\\u0079pe"])
def test_a_data_set_of_tfds_names_no_module_to_import(place, key):
    folder = place.folder / "data" / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    name = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
    (folder / "features.json").write_text(
        f'{{"type": "{name}", "content": {{"{key}": "evil.Feature"}}}}'
    )
    for read in (
        lambda _: sources.PreparedTfdsSource("mnist:3.0.1", str(place.folder / "data")),
        lambda _: images.Tfds(name="mnist", data_dir=str(place.folder / "data")).open("train"),
    ):
        assert "evil.Feature" in refused(place, read)


def test_features_of_other_modules_are_refused_wherever_the_data_lies(place, monkeypatch):
    from tensorflow_datasets.core.features import feature

    original = feature.FeatureConnector.cls_from_name
    monkeypatch.setattr(feature.FeatureConnector, "cls_from_name", original)
    tfds_features.import_none_of_others()
    tfds_features.import_none_of_others()
    read = feature.FeatureConnector.from_json
    assert read({"type": "tensorflow_datasets.core.features.text_feature.Text", "content": {}})
    for named in ({"type": "evil.Feature", "content": {}}, {"pythonClassName": "evil.Feature"}):
        assert "evil.Feature" in refused(place, lambda _, named=named: read(named))
