"""Gin files and bindings are read strictly, resolved completely, and built as gin would."""

import errno
import os
import pathlib
import sys

import commands
import gin
import pytest

from convt5 import errors
from convt5.configuration import gin_config, gin_files
from convt5.modeling import architecture, mixers
from convt5.training import schedule

HEAD = """
from __gin__ import dynamic_registration
from convt5.modeling import architecture
from convt5.configuration import gin_config
from convt5.training import schedule
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder):
    """Writes a gin file below the working directory and returns its name."""

    def write(name: str, text: str, *, head: str = HEAD) -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{head.strip()}\n{text.strip()}\n")
        return name

    return write


def fault(*args, **kwargs) -> str:
    with pytest.raises(errors.UserError) as caught:
        gin_config.load(*args, **kwargs)
    return str(caught.value)


COSINE = """
RATE = @schedule.Cosine()
schedule.Cosine.peak = 0.5
schedule.Cosine.total_steps = %STEPS
STEPS = 100
"""


def test_files_and_bindings_build_what_they_say(write):
    name = write("a.gin", COSINE)
    config = gin_config.load([name], ["STEPS=10"], roots=["%RATE"])
    assert config.macro("RATE") == schedule.Cosine(peak=0.5, total_steps=10)


def test_a_later_file_overrides_an_earlier_one(write):
    names = [write("a.gin", COSINE), write("b.gin", "schedule.Cosine.peak = 2.0")]
    rate = gin_config.load(names, roots=["%RATE"]).macro("RATE")
    assert rate.peak == 2.0


def test_loading_twice_leaves_nothing_of_the_first_configuration(write):
    name = write("a.gin", COSINE)
    other = write("b.gin", COSINE)
    gin_config.load([name], ["schedule.Cosine.final_fraction=0.5"], roots=["%RATE"]).macro("RATE")
    rate = gin_config.load([other], roots=["%RATE"]).macro("RATE")
    assert rate.final_fraction == 0.0


def test_blocks_lists_and_scopes_are_understood(write):
    name = write(
        "a.gin",
        """
STACKS = [@encoder/architecture.StackConfig(), @architecture.StackConfig()]
architecture.StackConfig:
    num_layers = 2
    kernel_size = [3,
                   5]
encoder/architecture.StackConfig.mixing = 'depthwise'
""",
    )
    first, second = gin_config.load([name], roots=["%STACKS"]).macro("STACKS")
    assert first == architecture.StackConfig(num_layers=2, kernel_size=(3, 5), mixing="depthwise")
    assert second == architecture.StackConfig(num_layers=2, kernel_size=(3, 5))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/tmp/x", "/tmp/x"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("runs/2024-01-01", "runs/2024-01-01"),
        ("data/*.txt", "data/*.txt"),
        ("c4_v220", "c4_v220"),
        ("two words", "two words"),
        ("'quoted'", "quoted"),
        ('"quoted"', "quoted"),
        ("a=b", "a=b"),
        ("7", 7),
        ("-7", -7),
        ("1e-3", 1e-3),
        ("True", True),
        ("None", None),
        ("[1, 'a']", [1, "a"]),
    ],
)
def test_command_line_values_are_literals_or_else_text(write, text, value):
    name = write("a.gin", "X = 0\nMODEL = %X")
    assert gin_config.load([name], [f"X={text}"]).macro("X") == value


@pytest.mark.parametrize("text", ["[1, 2", "'open", "@", "%", "", "{[1, 2]: 3}", "[-%X]"])
def test_a_value_that_starts_like_another_kind_is_not_taken_for_text(write, text):
    message = fault([write("a.gin", "X = 0\nMODEL = %X")], [f"X={text}"])
    assert f"--gin.X={text}" in message
    assert "quotes" in message


def test_references_and_macros_can_be_given_on_the_command_line(write):
    name = write("a.gin", COSINE + "schedule.Constant.rate = %PEAK\nPEAK = 3.0")
    config = gin_config.load([name], ["RATE=@schedule.Constant()"], roots=["%RATE"])
    assert config.macro("RATE") == schedule.Constant(rate=3.0)


def test_command_line_names_need_no_import(write):
    name = write("a.gin", "MODEL = 0", head="")
    bindings = ["MODEL=@schedule.Constant()", "schedule.Constant.rate=1.5"]
    assert gin_config.load([name], bindings, roots=["%MODEL"]).macro("MODEL").rate == 1.5


@pytest.mark.parametrize(
    ("reference", "module"),
    [
        ("averaging.EMA", "convt5.training.averaging"),
        ("convt5.averaging.EMA", "convt5.training.averaging"),
        ("spikes.SkipSpikes", "convt5.training.spikes"),
        ("augmentation.Augmentation", "convt5.vision.augmentation"),
        # Of two modules called sources, the one that has it.
        ("sources.Digits", "convt5.vision.sources"),
        ("schedule.InverseSqrt", "convt5.training.schedule"),
    ],
)
def test_command_line_names_may_be_those_of_modules_in_packages(write, reference, module):
    name = write("a.gin", "MODEL = 0", head="")
    config = gin_config.load([name], [f"MODEL=@{reference}"], roots=["%MODEL"])
    assert config.macro("MODEL").__module__ == module
    again = gin_config.load([write("b.gin", config.text, head="")], roots=["%MODEL"])
    assert again.macro("MODEL") is config.macro("MODEL")


def test_a_name_that_several_packages_have_is_not_guessed(write):
    name = write("a.gin", "MODEL = 0", head="")
    message = fault([name], ["MODEL=@sources.Nothing()"], roots=["%MODEL"])
    assert "may be one of convt5.tasks.sources, convt5.vision.sources" in message


def test_looking_for_a_module_imports_nothing():
    code = (
        "import sys\n"
        "from convt5.configuration.gin_names import _own\n"
        "assert _own('averaging', 'EMA') == ['convt5.training.averaging']\n"
        "assert not {'jax', 'numpy', 'convt5.training', 'convt5.vision'} & set(sys.modules)\n"
    )
    commands.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_misspelt_macro_on_the_command_line_is_an_error_that_names_the_right_one(write):
    message = fault([write("a.gin", COSINE)], ["STEP=3"], roots=["%RATE"])
    assert "--gin.STEP" in message
    assert "STEP=3 is not used" in message
    assert "Did you mean STEPS?" in message


def test_letters_of_another_case_are_recognised(write):
    assert "Did you mean STEPS?" in fault([write("a.gin", COSINE)], ["steps=3"], roots=["%RATE"])


def test_an_undefined_macro_names_file_and_line(write):
    message = fault([write("a.gin", COSINE + "schedule.Cosine.warmup_steps = %STEP")])
    assert "a.gin:9" in message
    assert "%STEP" in message
    assert "Did you mean STEPS?" in message


def test_an_unused_macro_in_a_file_is_an_error(write):
    message = fault([write("a.gin", COSINE + "WARMUP = 3")], roots=["%RATE"])
    assert "a.gin:9: macro WARMUP=3 is not used" in message


def test_a_macro_whose_only_use_was_overridden_is_no_error(write):
    name = write("a.gin", COSINE)
    config = gin_config.load([name], ["schedule.Cosine.total_steps=7"], roots=["%RATE"])
    assert config.macro("RATE").total_steps == 7


def test_a_misspelt_parameter_names_file_line_and_the_right_one(write):
    message = fault([write("a.gin", COSINE + "schedule.Cosine.warm_steps = 1")], roots=["%RATE"])
    assert "a.gin:9: schedule.Cosine has no parameter 'warm_steps'" in message
    assert "Did you mean warmup_steps" in message


def test_a_misspelt_class_names_file_line_and_the_right_one(write):
    message = fault([write("a.gin", "MODEL = @schedule.Cosin()")], roots=["%MODEL"])
    assert "a.gin:5: convt5.training.schedule has no 'Cosin'" in message
    assert "Did you mean Cosine or " in message


def test_a_module_that_is_not_imported_names_the_import_to_add(write):
    message = fault([write("a.gin", "MODEL = @losses.TextLoss()")], roots=["%MODEL"])
    assert "a.gin:5" in message
    assert "from convt5.training import losses" in message


def test_an_import_that_does_not_exist_is_reported_where_it_stands(write):
    message = fault([write("a.gin", "from convt5 import shedule\nMODEL = 1")])
    assert "a.gin:5: from convt5 import shedule" in message
    assert "Did you mean schedule?" in message


@pytest.mark.parametrize(
    ("code", "raised"),
    [("import math\n\nmath.nothing()\n", "AttributeError: "), ("x = 1\ny =\n", "SyntaxError: ")],
)
def test_a_module_that_fails_is_reported_with_its_own_line(
    write, folder, monkeypatch, code, raised
):
    monkeypatch.syspath_prepend(folder)
    name = f"broken_{len(code)}"
    (folder / f"{name}.py").write_text(code)
    message = fault([write("a.gin", f"import {name}\nMODEL = 1")])
    line = code.count("\n")
    assert f"a.gin:5: import {name}: {folder / name}.py:{line} raised {raised}" in message


def test_a_name_without_its_module_is_completed_in_the_message(write):
    message = fault([write("a.gin", COSINE)], ["Cosine.peak=1.0"], roots=["%RATE"])
    assert "Did you mean schedule.Cosine?" in message


def test_a_scope_that_nothing_enters_is_an_error(write):
    text = COSINE.replace("@schedule", "@train/schedule") + "trian/schedule.Cosine.peak = 3.0"
    message = fault([write("a.gin", text)], roots=["%RATE"])
    assert "a.gin:9: trian/schedule.Cosine.peak has no effect" in message
    assert "Did you mean train?" in message


def test_a_command_line_binding_that_reaches_nothing_is_an_error(write):
    message = fault([write("a.gin", COSINE)], ["schedule.Constant.rate=3.0"], roots=["%RATE"])
    assert "--gin.schedule.Constant.rate has no effect" in message
    assert "In use from there: schedule.Cosine" in message


@pytest.mark.parametrize(
    ("more", "bindings", "why"),
    [
        ("schedule.Constant.rate = %SLOW", [], "only schedule.Constant.rate would use %SLOW"),
        ("schedule.Cosine.warmup_steps = %SLOW", ["schedule.Cosine.warmup_steps=1"], "replace"),
    ],
)
def test_a_command_line_macro_that_reaches_nothing_is_told(more, bindings, why, write):
    name = write("a.gin", f"{COSINE}SLOW = 2\n{more}")
    with pytest.warns(UserWarning, match=f"--gin.SLOW has no effect: .*{why}"):
        gin_config.load([name], ["SLOW=3", *bindings], roots=["%RATE"])
    config = gin_config.load([name], ["STEPS=9", *bindings], roots=["%RATE"])
    assert config.macro("RATE").total_steps == 9


def test_a_macro_that_a_file_requires_may_be_given(write):
    required = "SLOW = %gin.REQUIRED\nSLOWER = %SLOW\nschedule.Constant.rate = %SLOWER"
    name = write("a.gin", f"{COSINE}{required}")
    for given in (["SLOW=3"], ["SLOW=3", "SLOWER=2"]):
        assert gin_config.load([name], given, roots=["%RATE"]).macro("RATE").peak == 0.5


def test_settings_of_related_programs_may_be_given(write):
    text = COSINE + "MODEL = @schedule.Constant()\nschedule.Constant.rate = 1.0"
    bindings = ["schedule.Constant.rate=3.0"]
    config = gin_config.load([write("a.gin", text)], bindings, roots=["%RATE"], related=["%MODEL"])
    assert config.macro("RATE").peak == 0.5


def test_all_missing_values_are_listed_together(write):
    name = write(
        "a.gin",
        """
MODEL = [@architecture.StackConfig(), @schedule.Cosine(), @schedule.Constant()]
architecture.StackConfig.num_layers = %LAYERS
LAYERS = %gin.REQUIRED
schedule.Cosine.peak = %gin.REQUIRED
""",
    )
    message = fault([name], roots=["%MODEL"])
    assert "4 required values are missing" in message
    for setting in ("LAYERS", "schedule.Cosine.peak", "schedule.Cosine.total_steps"):
        assert f"--gin.{setting}=VALUE" in message
    assert "--gin.schedule.Constant.rate=VALUE" in message


def test_what_is_missing_for_something_unused_does_not_matter(write):
    name = write("a.gin", COSINE + "schedule.Constant.rate = %gin.REQUIRED")
    assert gin_config.load([name], roots=["%RATE"]).macro("RATE").peak == 0.5


@pytest.mark.parametrize(
    ("binding", "rule"),
    [
        ("schedule.Cosine.total_steps=100k", "must be an integer"),
        ("schedule.Cosine.total_steps=1e3", "Write 1000."),
        ("schedule.Cosine.total_steps=None", "must be an integer"),
        ("schedule.Cosine.peak=high", "must be a number"),
        ("STEPS='many'", "schedule.Cosine.total_steps='many' must be an integer"),
    ],
)
def test_a_value_of_another_type_is_an_error_before_anything_is_built(write, binding, rule):
    message = fault([write("a.gin", COSINE)], [binding], roots=["%RATE"])
    assert rule in message
    assert f"--gin.{binding.partition('=')[0]}" in message


@pytest.mark.parametrize("setting", ["schedule.Cosine.peak", "schedule.Cosine.total_steps", "A"])
@pytest.mark.parametrize("value", ["0x" + "f" * 5_000, "[0x" + "f" * 5_000 + "]", "9" * 5_000])
def test_a_value_of_thousands_of_digits_is_shown_in_part(write, setting, value):
    message = fault([write("a.gin", COSINE)], [f"{setting}={value}"], roots=["%RATE"])
    assert f"{setting}=" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("binding", "shown"),
    [
        ("KERNELS = [%K, 7]\nK = 'x'", "'x'"),
        ("KERNELS = [%K, 7]\nK = %L\nL = [3]", "[3]"),
        (
            "KERNELS = [%K, 7]\nK = @schedule.Constant()\nschedule.Constant.rate = 1.0",
            "@schedule.Constant()",
        ),
    ],
)
def test_macros_inside_a_list_are_checked_as_well(write, binding, shown):
    settings = "architecture.StackConfig.num_layers = 2\narchitecture.StackConfig.kernel_size = "
    name = write("a.gin", f"{settings}%KERNELS\n{binding}")
    message = fault([name], roots=["@architecture.StackConfig"])
    assert f"architecture.StackConfig.kernel_size=[{shown}, 7] must be an integer" in message


def test_macros_inside_a_list_may_be_what_is_asked(write):
    settings = "architecture.StackConfig.num_layers = 2\narchitecture.StackConfig.kernel_size = "
    config = gin_config.load(
        [write("a.gin", f"{settings}[%K, 7]\nK = 3")], roots=["@architecture.StackConfig"]
    )
    assert config.arguments(architecture.StackConfig)["kernel_size"] == [3, 7]


def test_booleans_and_choices_are_checked_with_close_names(write):
    text = "MODEL = @architecture.StackConfig()\narchitecture.StackConfig.num_layers = 2"
    name = write("a.gin", text)
    flag = fault([name], ["architecture.StackConfig.pointwise=true"], roots=["%MODEL"])
    assert "Write True." in flag
    mixing = fault([name], ["architecture.StackConfig.mixing=dinamic"], roots=["%MODEL"])
    assert f"must be one of {', '.join(mixers.KINDS)}. Did you mean dynamic?" in mixing
    assert "Did you mean dynamic?" in mixing


def test_a_text_setting_given_a_number_says_to_quote_it(write):
    message = fault(
        [write("a.gin", "MODEL=@architecture.ConvT5Config()")],
        ["architecture.ConvT5Config.dtype=32"],
        roots=["%MODEL"],
    )
    assert "must be text" in message
    assert "Quote it" in message


RUN = """
import plugin
from convt5.checkpoints import checkpoint
from convt5.tasks import classification
from convt5.training import losses
from convt5.training import optimizer
from convt5.training import trainer
MODEL = @architecture.ConvT5Config()
OPTIMIZER = @optimizer.SGDConfig()
trainer.train.model = %MODEL
trainer.train.optimizer = %OPTIMIZER
"""


@pytest.mark.parametrize("value", ["{'a': 1, 'a': 2}", "[{'b': {1: 2, 1: 3}}]"])
def test_a_key_that_is_there_twice_is_refused(write, value):
    with pytest.raises(errors.UserError, match=r"a\.gin:5: .* the key ('a'|1) is there twice\."):
        gin_config.load([write("a.gin", f"MODEL = {value}")])


@pytest.mark.parametrize("value", ["{'a': {'a': 1}, 'b': {'a': 2}}", "[{'a': 1}, {'a': 1}, {}]"])
def test_other_dictionaries_may_have_the_same_key(write, value):
    config = gin_config.load([write("a.gin", f"MODEL = {value}")])
    assert repr(config.macro("MODEL")) == value


def plugged(folder, monkeypatch) -> None:
    """Makes a module of the user's importable."""
    (folder / "plugin.py").write_text(
        "class Optimizer:\n    def build(self, schedule): ...\n"
        "class Lazy(Optimizer):\n    def __call__(self, model, data): ...\n"
        "def anything(): ...\ndef report(model, data): ...\n"
    )
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("binding", "rule"),
    [
        ("OPTIMIZER=@optimizer.SGDConfig", "Write @optimizer.SGDConfig(): the parentheses"),
        ("trainer.train.schedule=@schedule.Constant", "Write @schedule.Constant(): the par"),
        ("trainer.train.schedule=@optimizer.SGDConfig()", "must be a reference such as @module."),
        (
            "trainer.train.optimizer=@architecture.ConvT5Config()",
            "must be a reference such as @mod",
        ),
        ("trainer.train.model=@optimizer.SGDConfig()", "such as @module.ModelConfig()"),
        ("trainer.train.checkpoint=@optimizer.SGDConfig()", "@module.CheckpointConfig() or None"),
        ("trainer.train.loss=@losses.TextLoss", "Write @losses.TextLoss()"),
        ("trainer.train.report=@plugin.Lazy", "must be a reference to something that can be"),
        ("trainer.train.report=3", "must be a reference to something that can be called or None"),
        ("trainer.train.sharding_rules=@plugin.anything", "Write @plugin.anything()"),
        ("trainer.train.task_evals=@plugin.Optimizer()", "must be a list of a reference"),
        ("trainer.train.task_evals=[@plugin.Optimizer]", "must be a list of a reference"),
        ("architecture.ConvT5Config.encoder=@architecture.StackConfig", "StackConfig()"),
        ("architecture.ConvT5Config.mlp=@plugin.Optimizer()", "must be one of"),
        ("classification.text_classification.vocabulary='bytes'", "such as @module.Vocabulary()"),
        ("classification.text_classification.path=3", "must be text or a list of text or a dict"),
    ],
)
def test_a_reference_to_another_kind_of_object_is_an_error(
    write, folder, monkeypatch, binding, rule
):
    plugged(folder, monkeypatch)
    message = fault([write("a.gin", RUN)], [binding], roots=["@trainer.train"])
    assert f"--gin.{binding.partition('=')[0]}" in message
    assert rule in message


@pytest.mark.parametrize(
    "binding",
    [
        "OPTIMIZER=@plugin.Optimizer()",
        "OPTIMIZER=@plugin.anything()",
        "trainer.train.schedule=@plugin.anything",
        "trainer.train.report=@plugin.Lazy()",
        "trainer.train.report=@plugin.report",
        "trainer.train.sharding_rules=@plugin.anything()",
    ],
)
def test_objects_of_the_users_own_fit_where_they_do_what_is_asked(
    write, folder, monkeypatch, binding
):
    plugged(folder, monkeypatch)
    message = fault([write("a.gin", RUN)], [binding], roots=["@trainer.train"])
    assert "missing" in message  # What a run needs besides.
    assert binding.partition("=")[0] not in message


def test_one_value_where_a_list_or_a_dictionary_is_wanted_says_so(write):
    name = write("a.gin", "from convt5 import sweeps")
    roots = ["@convt5.sweeps.Study"]
    message = fault([name], ["sweeps.Study.grids=@sweeps.Grid()"], roots=roots)
    assert "Write [@sweeps.Grid()]." in message
    assert "Write [3]." in fault([name], ["sweeps.Study.seeds=3"], roots=roots)
    message = fault([name], ["sweeps.Study.bindings=3"], roots=roots)
    assert "must be a dictionary" in message


def test_a_missing_file_names_close_ones(write):
    write("gin/runs/pretrain.gin", "")
    message = fault(["gin/runs/pretrian.gin"])
    assert "'gin/runs/pretrian.gin' does not exist" in message
    assert "gin/runs/pretrain.gin" in message


def test_a_missing_file_in_another_folder_is_found_by_its_base_name(folder):
    assert "gin/models/dynamic_tiny.gin" in fault(["dynamic_tiny.gin"])


def test_a_missing_include_names_the_line_that_wants_it(write):
    message = fault([write("a.gin", "include 'gin/models/dynamic_tinny.gin'")])
    assert "a.gin:5: gin file 'gin/models/dynamic_tinny.gin' does not exist" in message
    assert "Did you mean gin/models/dynamic_tiny.gin" in message


def test_all_files_that_cannot_be_read_are_listed(write):
    name = write("a.gin", "X = [1,\nY = 2")
    message = fault(["none.gin", name])
    assert "2 faults" in message
    assert "none.gin" in message
    assert "a.gin:" in message


@pytest.mark.parametrize(
    "line",
    [
        "X = depthwise",
        "X 3",
        "X = [1, 2",
        "X = 'open",
        "= 3",
        "X = -%Y",  # Gin itself reads %Y.
        "X = [1, -@f()]",
        "X = {[1, 2]: 3}",
        "X = {{}: 3}",
    ],
)
def test_a_line_that_is_no_gin_names_file_and_line(write, line):
    message = fault([write("a.gin", line, head="# first line")])
    assert "a.gin:2" in message or "a.gin:3" in message


def test_a_file_that_includes_itself_is_an_error(write):
    write("a.gin", "include 'b.gin'")
    message = fault([write("b.gin", "include 'a.gin'")])
    assert "includes itself" in message


def test_includes_resolve_beside_the_including_file(write):
    write("deep/part.gin", COSINE)
    name = write("deep/a.gin", "include 'part.gin'")
    assert gin_config.load([name], roots=["%RATE"]).macro("RATE").peak == 0.5


def test_files_of_one_name_each_have_their_own_imports(write):
    head = "from __gin__ import dynamic_registration\nfrom convt5.training import {} as mine"
    write("a/common.gin", "mine.Constant.rate = 0.1", head=head.format("schedule"))
    write("b/common.gin", "mine.EMA.decay = 0.5", head=head.format("averaging"))
    names = [write(f"{name}/run.gin", "include 'common.gin'") for name in "ab"]
    text = gin_config.load(names).text
    assert "schedule.Constant.rate = 0.1" in text
    assert "averaging.EMA.decay = 0.5" in text


def test_an_include_is_the_file_beside_even_where_the_working_directory_has_one_of_its_name(write):
    write("part.gin", COSINE.replace("0.5", "0.25"))
    write("deep/part.gin", COSINE)
    name = write("deep/a.gin", "include 'part.gin'")
    assert gin_config.load([name], roots=["%RATE"]).macro("RATE").peak == 0.5


def test_files_of_the_working_directory_come_before_those_of_the_package(write):
    name = write("gin/models/dynamic_tiny.gin", COSINE)
    assert gin_config.load([name], roots=["%RATE"]).macro("RATE").peak == 0.5


def test_files_of_the_package_are_found_from_any_directory(folder):
    config = gin_config.load(["gin/models/dynamic_tiny.gin"], roots=["%MODEL"])
    assert config.macro("MODEL").emb_dim == 128


MODEL = """
MODEL = @architecture.StackConfig()
architecture.StackConfig.num_layers = 2
"""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_model_file_replaces_the_included_one_and_nothing_of_it_remains(write, order):
    write("first.gin", MODEL + "architecture.StackConfig.num_kernels = 2\nMODEL_NAME = 'first'")
    second = write(
        "second.gin",
        MODEL + "architecture.StackConfig.mixing = 'depthwise'\n"
        "architecture.StackConfig.dilation = 2\nMODEL_NAME = 'second'",
    )
    run = write("run.gin", "include 'first.gin'\narchitecture.StackConfig.dilation = 3")
    files = [[run, second][i] for i in order]
    config = gin_config.load(files, roots=["%MODEL"])
    expected = architecture.StackConfig(num_layers=2, mixing="depthwise", dilation=3)
    assert config.macro("MODEL") == expected  # The run's own setting stands.
    assert config.macro("MODEL_NAME") == "second"


def test_a_model_file_may_build_on_another_one(write):
    write("first.gin", MODEL + "MODEL_NAME = 'first'")
    second = write(
        "second.gin",
        "include 'first.gin'\narchitecture.StackConfig.dilation = 2\nMODEL_NAME = 'second'",
    )
    run = write("run.gin", "include 'first.gin'")
    config = gin_config.load([run, second], roots=["%MODEL"])
    assert config.macro("MODEL") == architecture.StackConfig(num_layers=2, dilation=2)


def test_two_model_files_are_an_error(folder):
    files = ["gin/models/dynamic_tiny.gin", "gin/models/t5_tiny.gin"]
    message = fault(files)
    assert "are all model files" in message
    assert all(name in message for name in files)


def test_the_resolved_text_repeats_the_configuration_and_holds_the_defaults(write, folder):
    config = gin_config.load(
        ["gin/models/hybrid_tiny.gin"],
        ["encoder/architecture.StackConfig.kernel_size=[3, 5, 7, 9]"],
        roots=["%MODEL"],
    )
    again = gin_config.load([write("again.gin", config.text, head="")], roots=["%MODEL"])
    assert again.macro("MODEL") == config.macro("MODEL")
    assert again.text == config.text
    assert "architecture.ConvT5Config.norm_epsilon = 1e-06" in config.text


def test_the_resolved_text_leaves_out_macros_whose_uses_were_replaced(write):
    """schedule.Cosine.total_steps=5 leaves STEPS, and what STEPS is made of, without a use."""
    name = write("a.gin", COSINE + "STEPS = %LONG\nLONG = %gin.REQUIRED\n")
    config = gin_config.load([name], ["schedule.Cosine.total_steps=5"], roots=["%RATE"])
    again = gin_config.load([write("b.gin", config.text, head="")], roots=["%RATE"])
    assert again.macro("RATE").total_steps == 5
    assert again.text == config.text


def test_the_resolved_text_is_plain_gin(folder):
    config = gin_config.load(["gin/models/dynamic_tiny.gin"], roots=["%MODEL"])
    gin.clear_config()
    gin.parse_config(config.text)
    built = gin.get_configurable(architecture.ConvT5Config)()
    assert built == config.macro("MODEL")


def test_modules_of_one_name_stay_apart_in_the_resolved_text(write, folder, monkeypatch):
    (folder / "mine").mkdir()
    (folder / "mine" / "schedule.py").write_text("def half(rate: float): return rate / 2\n")
    monkeypatch.syspath_prepend(str(folder))
    name = write(
        "a.gin",
        COSINE.replace("0.5", "@other.half()") + "other.half.rate = 1.0",
        head=HEAD + "from mine import schedule as other",
    )
    config = gin_config.load([name], roots=["%RATE"])
    again = gin_config.load([write("b.gin", config.text, head="")], roots=["%RATE"])
    assert again.macro("RATE").peak == config.macro("RATE").peak == 0.5


def test_modules_imported_for_what_they_do_stay_in_the_resolved_text(write, folder, monkeypatch):
    """Tasks are registered so; a mixture of them comes after them, as it was written."""
    (folder / "reviews.py").write_text("REGISTERED = ['task']\n")
    (folder / "more").mkdir()
    (folder / "more" / "mixtures.py").write_text(
        "import sys\nsys.modules['reviews'].REGISTERED.append('mixture')\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    head = HEAD + "import reviews\nfrom more import mixtures"
    text = gin_config.load([write("a.gin", COSINE, head=head)], roots=["%RATE"]).text
    assert "from convt5.training import schedule\nimport reviews\nfrom more" in text
    assert "gin_config" not in text  # Importing ours does nothing.
    for name in ("reviews", "more.mixtures"):
        del sys.modules[name]
    again = gin_config.load([write("b.gin", text, head="")], roots=["%RATE"])
    assert sys.modules["reviews"].REGISTERED == ["task", "mixture"]
    assert again.text == text


def test_a_module_of_the_user_that_is_not_found_says_how_it_can_be(write):
    message = fault([write("a.gin", "import my_tasks\nMODEL = 1")])
    assert "a.gin:5: import my_tasks: there is no module my_tasks" in message
    assert "PYTHONPATH" in message


def test_modules_of_the_user_may_be_called_as_one_of_ours(write, folder, monkeypatch):
    """Ours is `schedule` in the resolved text, and theirs what nothing else is called."""
    monkeypatch.syspath_prepend(str(folder))
    for name in ("schedule", "schedule_2"):
        (folder / f"{name}.py").write_text("def half(rate: float): return rate / 2\n")
    name = write(
        "a.gin",
        COSINE.replace("0.5", "@a.half()") + "a.half.rate = @b.half()\nb.half.rate = 2.0",
        head=HEAD + "import schedule as a\nimport schedule_2 as b",
    )
    config = gin_config.load([name], roots=["%RATE"])
    again = gin_config.load([write("b.gin", config.text, head="")], roots=["%RATE"])
    assert again.macro("RATE").peak == config.macro("RATE").peak == 0.5
    assert again.text == config.text


def test_user_errors_of_constructors_come_without_the_lines_of_gin(write):
    config = gin_config.load([write("a.gin", COSINE)], ["STEPS=-1"], roots=["%RATE"])
    with pytest.raises(errors.UserError) as caught:
        config.macro("RATE")
    assert type(caught.value) is errors.UserError
    assert "configurable" not in str(caught.value)
    assert "total_steps=-1" in str(caught.value)


def test_errors_of_files_in_constructors_keep_the_path(write, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "text.txt")

    monkeypatch.setattr(schedule.Cosine, "__post_init__", refuse)
    config = gin_config.load([write("a.gin", COSINE)], roots=["%RATE"])
    with pytest.raises(PermissionError) as caught:
        config.macro("RATE")
    assert (caught.value.filename, caught.value.errno) == ("text.txt", errno.EACCES)


def test_arguments_of_a_function_are_built(write):
    name = write("a.gin", "gin_config.folder.parts = ['runs', %MODEL_NAME]\nMODEL_NAME = 'tiny'")
    config = gin_config.load([name], roots=["@gin_config.folder"])
    assert config.arguments(gin_config.folder) == {"parts": ["runs", "tiny"]}


def test_parameters_that_the_program_supplies_are_not_missing(write):
    name = write("a.gin", "MODEL = 1")
    config = gin_config.load([name], roots=["@gin_config.folder"], supplied=["parts"])
    assert "parts" not in config.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [("X", "no '='"), ("=3", "no name"), ("a b=3", "is no name"), ("3=x", "is no name")],
)
def test_a_binding_without_a_name_or_value_is_explained(write, text, reason):
    message = fault([write("a.gin", "MODEL = 1")], [text])
    assert "--gin" in message
    assert reason in message


def test_a_class_without_a_parameter_is_explained(write):
    remedy = "schedule.NAME.PARAMETER"
    assert remedy in fault([write("a.gin", COSINE)], ["schedule.Cosine=3"], roots=["%RATE"])
    assert remedy in fault([write("b.gin", COSINE + "schedule.Cosine = 3")], roots=["%RATE"])


def test_a_value_that_cannot_be_read_shows_nothing_of_python(write):
    message = fault([write("a.gin", "X = 0\nMODEL = %X")], ["X=[a, b]"])
    assert "'a'" in message
    assert "<" not in message


def test_a_folder_is_no_gin_file(write, folder):
    write("gin/a.gin", "MODEL = 1")
    for name in ("gin", str(folder / "gin")):
        assert f"{name!r} is no file; name a file in it" in fault([name])


def test_a_file_may_begin_with_a_byte_order_mark(folder):
    (folder / "a.gin").write_text("MODEL = 1", encoding="utf-8-sig")
    assert gin_config.load(["a.gin"]).macro("MODEL") == 1


def test_the_search_begins_at_the_working_directory(folder):
    assert gin_files.roots()[0] == folder
