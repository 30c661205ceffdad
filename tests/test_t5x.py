"""Checkpoints of T5X: its numbers, its next steps of training, and what is no such checkpoint."""

import ast
import dataclasses
import functools
import gzip
import json
import pathlib
import re
import shutil
import time

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from quick import quick

from convt5 import convert
from convt5.checkpoints.reading import find_checkpoint, load_everything
from convt5.errors import UserError
from convt5.generation.decoding import Greedy, decode
from convt5.interchange import t5x, t5x_files
from convt5.interchange.operative_config import OperativeConfig
from convt5.interchange.optimizer_state import import_state
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import MeshConfig, batch_sharding
from convt5.modeling.tree_paths import named_leaves
from convt5.training.train_state import abstract_state, parameters, state_shardings
from convt5.training.train_step import StepConfig, make_train_step

VERSIONS = ["v1_0", "v1_1", "v1_1_bf16"]
# Of T5X's float32 logits, from which another float64 implementation differs by up to 2.1e-5.
TOLERANCE = 2.5e-5
BATCH = (
    *("encoder_input_tokens", "decoder_input_tokens"),
    *("decoder_target_tokens", "decoder_loss_weights"),
)


@functools.cache
def reference(folder) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "reference.npz"))


@functools.cache
def opened(path) -> tuple:
    files = t5x_files.Files(path)
    gin = path.parents[1] if path.parent.name == "orbax" else path.parent
    settings = OperativeConfig.read(gin / "model.gin")
    return files, t5x.read_model(files, settings), settings


@pytest.fixture(params=quick(VERSIONS, chosen=["v1_1_bf16"]))
def folder(request, golden):
    return golden / "t5x" / request.param


def test_logits_and_greedy_ids_equal_those_of_t5x(folder, x64):
    """In float64: the rounding of float32 depends on the processor, and is up to twice T5X's."""
    _, imported, _ = opened(folder / "checkpoint_3")
    exact = dataclasses.replace(imported.config, dtype="float64")
    ref, model = reference(folder), imported._replace(config=exact).model()
    logits = jax.jit(lambda m, *tokens: m(*tokens))(model, *(ref[name] for name in BATCH[:2]))
    where = ref["decoder_loss_weights"] > 0
    np.testing.assert_allclose(
        np.asarray(logits)[where], ref["logits"][where], rtol=0, atol=TOLERANCE
    )
    wanted = ref["t5x_greedy_ids"]
    found = decode(model, ref[BATCH[0]], max_length=wanted.shape[1], strategy=Greedy())
    np.testing.assert_array_equal(found.tokens[:, 0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1_0", "v1_1"])
def test_the_form_of_orbax_holds_the_same(golden, version):
    native = opened(golden / "t5x" / version / "checkpoint_3")
    orbax = opened(golden / "t5x" / version / "orbax" / "checkpoint_3")
    assert orbax[1].config == native[1].config
    assert orbax[1].step == native[1].step == 3
    for path, value in native[1].params.items():
        np.testing.assert_array_equal(orbax[1].params[path], value)
    moments = [t5x.read_moments(files, imported) for files, imported, _ in (native, orbax)]
    jax.tree.map(np.testing.assert_array_equal, *moments)


@pytest.mark.slow
def test_training_goes_on_as_in_t5x(folder):
    files, imported, settings = opened(folder / "checkpoint_3")
    ref = reference(folder)
    training = t5x.training_settings(settings)
    optimizer = training.optimizer.build(training.schedule)
    moments = t5x.read_moments(files, imported)
    imported = imported._replace(params=dict(imported.params))
    state = import_state(imported, optimizer, moments)
    mesh = MeshConfig().build(jax.devices()[:1])
    shardings = state_shardings(abstract_state(imported.config, optimizer), mesh, TEXT_RULES)
    step_config = StepConfig(
        model=imported.config,
        loss=training.loss,
        optimizer=training.optimizer,
        schedule=training.schedule,
    )
    step = make_train_step(
        step_config, optimizer, shardings, batch_sharding(mesh), seed_key=jax.random.key(0)
    )
    state = jax.device_put(state, shardings)
    for i in (3, 4):
        state, metrics = step(state, {name: jnp.asarray(ref[f"train_{name}"][i]) for name in BATCH})
        assert float(metrics["objective"]) == pytest.approx(ref["losses"][i], rel=2e-6)
        assert float(metrics["learning_rate"]) == pytest.approx(ref["learning_rates"][i], rel=1e-6)
    params = dict(named_leaves(parameters(state.model)))
    for source in imported.sources:
        name = source.names[0].removeprefix("target/")
        norm = np.linalg.norm(np.asarray(params[source.path], np.float64))
        assert norm == pytest.approx(float(ref[f"final_norm/{name}"]), rel=1e-5), name


def copied(golden, tmp_path) -> pathlib.Path:
    folder = tmp_path / "run"
    shutil.copytree(golden / "t5x" / "v1_1", folder, copy_function=shutil.copyfile)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_command_makes_a_run_that_goes_on(golden, tmp_path):
    source, out = golden / "t5x" / "v1_1", tmp_path / "run"
    flags = (f"--checkpoint={source}", f"--output_dir={out}", "--optimizer")
    assert convert.main(["--from=t5x", *flags]) == 0
    assert find_checkpoint(out).name == "3"
    text = (out / "config.gin").read_text()
    assert "AdafactorConfig.min_dim_to_factor = 16" in text
    assert "TextLoss.normalize_by = 'nothing'" in text
    assert "InverseSqrt.multiplier = 0.014" in text
    assert "model.gin, found beside" in (out / "conversion.txt").read_text()


def test_shapes_alone_say_what_the_optimizer_factors(golden):
    files, imported, settings = opened(golden / "t5x" / "v1_1" / "checkpoint_3")
    told = t5x.training_settings(settings)
    assert t5x.factoring_as_kept(told, files, imported) == told
    found = t5x.factoring_as_kept(t5x.training_settings(None), files, imported)
    assert found.optimizer.min_dim_to_factor <= told.optimizer.min_dim_to_factor + 8
    import_state(
        imported._replace(params=dict(imported.params)),
        found.optimizer.build(found.schedule),
        t5x.read_moments(files, imported),
    )


def written(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> pathlib.Path:
    """A native checkpoint whose arrays all lie in its msgpack file."""
    tree: dict = {}
    for name, array in arrays.items():
        *parents, leaf = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        packed = msgpack.packb([list(array.shape), str(array.dtype), array.tobytes()])
        node[leaf] = msgpack.ExtType(1, packed)
    folder.mkdir()
    (folder / "checkpoint").write_bytes(msgpack.packb({"version": 3, "optimizer": tree}))
    return folder


def target(golden) -> dict[str, np.ndarray]:
    """The parameters of v1_1."""
    files, _, _ = opened(golden / "t5x" / "v1_1" / "checkpoint_3")
    return {name: files.read(name) for name in files.shapes if name.startswith("target/")}


def scanned(golden) -> dict[str, np.ndarray]:
    """The parameters of v1_1 as `t5x/examples/scalable_t5` names and stacks them."""
    arrays = target(golden)
    found = {name: array for name, array in arrays.items() if "/layers_" not in name}
    for stack in ("encoder", "decoder"):
        bias = found.pop(f"target/{stack}/relpos_bias/rel_embedding")
        first = f"target/{stack}/layers_0/"
        kinds = [name.removeprefix(first) for name in arrays if name.startswith(first)]
        count = sum(bool(re.fullmatch(rf"target/{stack}/layers_\d+/{kinds[0]}", n)) for n in arrays)
        for kind in kinds:
            layers = [arrays[f"target/{stack}/layers_{i}/{kind}"] for i in range(count)]
            found[f"target/{stack}/layers/{kind}"] = np.stack(layers, axis=1)
        name = f"target/{stack}/layers/relative_posemb/rel_embedding"
        found[name] = np.stack([bias] * count, axis=1)
    return found


def test_settings_that_are_not_read_are_noted(golden, tmp_path, capsys):
    gin = tmp_path / "model.gin"
    gin.write_text("include 't5x/examples/t5/t5_1_1/base.gin'\nnetwork.T5Config.dropout_rate = 0.0")
    source = f"--checkpoint={golden / 't5x' / 'v1_1'}"
    flags = ("--from=t5x", "--to=safetensors", source, f"--operative_config={gin}")
    assert convert.main([*flags, f"--output_dir={tmp_path / 'out'}"]) == 0
    told = capsys.readouterr().out
    assert "base.gin' is not read" in told
    assert "mlp_activations not given: gated_gelu assumed" in told


def test_layers_in_one_array_are_taken_apart(golden, tmp_path):
    files = t5x_files.Files(written(tmp_path / "checkpoint_7", scanned(golden)))
    found = t5x.read_model(files)
    _, native, _ = opened(golden / "t5x" / "v1_1" / "checkpoint_3")
    assert dataclasses.replace(found.config, dropout_rate=0.0) == native.config
    assert found.step == 0
    jax.tree.map(np.testing.assert_array_equal, found.params, native.params)


def test_arrays_of_any_precision_are_read(tmp_path):
    arrays = {f"target/{n}": np.asarray([1.5, -2], n) for n in ("float16", "float32", "float64")}
    files = t5x_files.Files(written(tmp_path / "t5x", arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(files.read(name), array.astype(np.float32), strict=True)


def test_a_step_that_float32_does_not_hold_is_read_as_it_is(tmp_path):
    arrays = {"state/step": np.asarray(2**24 + 1, np.int32)}
    assert t5x_files.Files(written(tmp_path / "t5x", arrays)).step() == 2**24 + 1


def no_state(arrays):
    pass


def integers(arrays):
    arrays["target/decoder/decoder_norm/scale"] = np.ones(48, np.int32)


def momentum(arrays):
    for name in [name for name in arrays if name.startswith("target/")]:
        state = name.replace("target/", "state/param_states/")
        arrays |= {f"{state}/v": arrays[name], f"{state}/m": arrays[name]}


def state_of_all_layers(arrays):
    arrays["state/param_states/encoder/layers/mlp/wo/kernel/v"] = np.zeros((2, 2), np.float32)


def other_bias(arrays):
    arrays["target/decoder/layers/relative_posemb/rel_embedding"][:, 1] += 1


def many_layers(arrays):
    arrays["target/decoder/layers/pre_mlp_layer_norm/scale"] = np.zeros((1, 2000), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (integers, "decoder_norm/scale': int32 is no dtype of weights"),
        (no_state, "holds no optimizer state of Adafactor; leave out --optimizer"),
        (momentum, r"has momentum \(state/.*/m\), which .*; leave out --optimizer"),
        (state_of_all_layers, "of all layers in one array, .*; leave out --optimizer"),
        (other_bias, "layers of the decoder have different relative biases"),
        (many_layers, "has 2,000 layers"),
    ],
)
def test_what_cannot_be_imported_is_one_message(golden, tmp_path, change, message):
    arrays = target(golden) if change is momentum else scanned(golden)
    change(arrays)
    folder = written(tmp_path / "checkpoint_7", arrays)
    flags = (f"--checkpoint={folder}", f"--output_dir={tmp_path / 'out'}", "--optimizer")
    with pytest.raises(UserError, match=message):
        convert.main(["--from=t5x", *flags])


def edit(path: pathlib.Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def pack(path: pathlib.Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content, 1))


EMBEDDING = "checkpoint_3/target.token_embedder.embedding"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / EMBEDDING / "0.0").unlink(), r"lacks its piece 0\.0"),
        (lambda f: (f / EMBEDDING / "0.0").write_bytes(b"x"), "cannot be read"),
        (lambda f: (f / EMBEDDING / ".zarray").unlink(), "cannot be read"),
        (
            lambda f: edit(f / EMBEDDING / ".zarray", shape=[10**12, 48]),
            "vocab_size=160, but the che",
        ),
        (lambda f: edit(f / EMBEDDING / ".zarray", chunks=[10**9, 48]), "has chunks"),
        (lambda f: edit(f / EMBEDDING / ".zarray", dtype="|O"), "is stored as"),
        (lambda f: edit(f / EMBEDDING / ".zarray", compressor={"id": "blosc"}), "compressed by"),
        (lambda f: edit(f / EMBEDDING / ".zarray", compressor=7), "compressed by 7"),
        (lambda f: pack(f / EMBEDDING / "0.0", bytes(2**28)), "cannot be read"),
        (lambda f: pack(f / EMBEDDING / "0.0", bytes(30_719)), "cannot be read"),
        (lambda f: (f / "checkpoint_3/checkpoint").write_bytes(b"\x93"), "cannot be read"),
        (lambda f: (f / "checkpoint_3/checkpoint").write_bytes(b"\x81\xa1a\xc0"), "no checkpoint"),
        (lambda f: shutil.rmtree(f / "checkpoint_3"), "holds no checkpoint of T5X"),
    ],
)
def test_a_damaged_checkpoint_is_one_message_and_nothing_is_written(
    golden, tmp_path, damage, message
):
    folder = copied(golden, tmp_path)
    damage(folder)
    out = tmp_path / "out"
    with pytest.raises(UserError, match=message):
        convert.main(["--from=t5x", f"--checkpoint={folder}", f"--output_dir={out}"])
    assert not out.exists()


def test_layers_of_arrays_without_numbers_are_not_counted_without_end(tmp_path):
    empty = np.zeros((0, 1000), np.float32)
    arrays = {f"target/encoder/layers/{i}": empty for i in range(110)}
    with pytest.raises(UserError, match="more than 100,000 arrays of single layers"):
        t5x_files.OneByOne(t5x_files.Files(written(tmp_path / "checkpoint_7", arrays)))


def test_arrays_that_msgpack_only_counts_are_not_made():
    with pytest.raises(ValueError, match="exceeds"):
        t5x_files._unpack(b"\xdd\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="no array"):
        t5x_files._unpack(b"\xc7\x01\x07a")


# Each is many times larger in memory than in the file.
MANY = [
    {str(i): {} for i in range(200)},
    {str(i): {str(j): 0 for j in range(20)} for i in range(10)},
    [[[] for _ in range(60)] for _ in range(4)],
    msgpack.ExtType(1, msgpack.packb([[[[]] * 60] * 4, "float32", b""])),
]


@pytest.mark.parametrize("tree", MANY, ids=range(len(MANY)))
def test_entries_of_a_tree_are_counted_wherever_they_are(tree, monkeypatch):
    monkeypatch.setattr(t5x_files, "_MOST_ENTRIES", 150)
    with pytest.raises(ValueError, match="too many entries"):
        t5x_files._unpack(msgpack.packb(tree))


@pytest.mark.parametrize("key", ["../target", "/etc", "..", "a/b", "", 7, None, "a\0b"])
def test_no_name_of_an_array_of_orbax_leads_out_of_its_folder(key):
    path = [{"key": "target", "key_type": 2}, {"key": key, "key_type": 2}]
    with pytest.raises(ValueError, match="in its name"):
        t5x_files._check_names({"tree_metadata": {"x": {"key_metadata": path}}})


DIVIDED_BY = "models.EncoderDecoderModel.loss_normalizing_factor"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("network.T5Config.emb_dim = 49", "emb_dim=49, but the checkpoint has 48"),
        ("network.T5Config:\n  mlp_activations = ('relu',)", "mlp_activations"),
        ("network.T5Config:\n  mlp_activations = (['gelu'], 'linear')", "mlp_activations"),
        ("adafactor.Adafactor.beta1 = 0.9", r"beta1=0\.9 is not implemented"),
        (
            "OPTIMIZER = @t5x.optimizers.adamw()\n"
            "models.EncoderDecoderModel.optimizer_def = %OPTIMIZER",
            r"EncoderDecoderModel\.optimizer_def='adamw' is not implemented; remove the line to",
        ),
        ("trainer.Trainer.learning_rate_fn = @my.ramp()", "learning_rate_fn='ramp' is not impl"),
        ("adafactor.Adafactor.max_parameter_scale = 1.0", r"max_parameter_scale=1\.0 is not"),
        ("adafactor.Adafactor.global_norm_clip_threshold = 1.0", "global_norm_clip_threshold=1"),
        ("utils.create_learning_rate_scheduler.step_offset = 9", "step_offset=9 is not impl"),
        ("utils.create_learning_rate_scheduler.min_learning_rate = 1.0", "min_learning_rate=1.0"),
        ("utils.create_learning_rate_scheduler.factors = 'x'", "factors='x' is not implemented"),
        (f"{DIVIDED_BY} = 'AVERAGE_PER_SEQUENCE'", "'AVERAGE_PER_SEQUENCE' is not implemented"),
        (f"{DIVIDED_BY} = 0", "=0 must be above 0"),
    ],
)
def test_settings_that_do_not_fit_are_named(golden, tmp_path, line, message):
    gin = tmp_path / "model.gin"
    gin.write_text(line)
    flags = (f"--checkpoint={golden / 't5x' / 'v1_1'}", f"--output_dir={tmp_path / 'out'}")
    with pytest.raises(UserError, match=message):
        convert.main(["--from=t5x", *flags, f"--operative_config={gin}"])


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        ("None", ("nothing", 1)),
        ("233472", ("nothing", 233_472)),
        ("'NUM_REAL_TARGET_TOKENS'", ("tokens", 1)),
        ("'num_total_target_tokens'", ("positions", 1)),
    ],
)
def test_what_divided_the_loss_divides_it_further(factor, expected):
    text = f"FACTOR = {factor}\n{DIVIDED_BY} = %FACTOR"
    training = t5x.training_settings(OperativeConfig(text))
    assert (training.loss.normalize_by, training.loss_divisor) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, 1e-4),
        (OperativeConfig("models.EncoderDecoderModel.label_smoothing = 0.1"), 0),
        (OperativeConfig("models.EncoderDecoderModel.z_loss = 0.01"), 0.01),
    ],
)
def test_z_loss_is_that_of_t5_only_where_no_settings_are(settings, expected):
    assert t5x.training_settings(settings).loss.z_loss == expected


@pytest.mark.slow
def test_the_memory_of_a_divided_loss_is_that_of_its_sum(golden, tmp_path):
    gin = tmp_path / "model.gin"
    source = golden / "t5x" / "v1_1"
    told = (source / "model.gin").read_text()
    gin.write_text(told.replace("LOSS_NORMALIZING_FACTOR = None", "LOSS_NORMALIZING_FACTOR = 8"))
    flags = ("--from=t5x", f"--checkpoint={source}", "--optimizer")
    for name, settings in (("sum", []), ("quotient", [f"--operative_config={gin}"])):
        assert convert.main([*flags, *settings, f"--output_dir={tmp_path / name}"]) == 0
    states = [load_everything(find_checkpoint(tmp_path / n)) for n in ("sum", "quotient")]
    moments = [{k: v for k, v in state["optimizer"].items() if "moments" in k} for state in states]
    assert moments[0]
    for name, array in moments[0].items():
        np.testing.assert_array_equal(moments[1][name], 64 * np.asarray(array), err_msg=name)


@pytest.mark.parametrize(
    "text",
    [
        f"'{chr(92)}'" * 200_000,
        "'" + r"\'" * 200_000,
        "'" + r"\'" * 200_000 + "\\" * 3,
        "@a" + ".a" * 50 + "!",
    ],
    ids=["quotes", "escapes", "backslashes", "reference"],
)
def test_no_line_of_a_gin_file_takes_more_than_its_length(text):
    started = time.process_time()
    OperativeConfig(f"f.x = {text}").reference("f", "x")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("text", [r"r'state/(.*'", r"'it\'s [ # fine'", '"{: ("  # )'])
def test_brackets_and_signs_in_texts_end_no_statement(text):
    config = OperativeConfig(f"a.f.x = {text}\na.f.y = 0.0\n")
    assert config.number("f", "y", 0.1) == 0.0
    assert config.get("f", "x") == ast.literal_eval(text.partition("  #")[0])


def test_bindings_in_blocks_are_those_of_their_name():
    text = "T5Config:  # sizes\n  emb_dim = 8\n  mlp = [\n    1,\n  ]\nOther.emb_dim = 9\n"
    found = OperativeConfig(text)
    assert found.get("T5Config", "emb_dim") == 8
    assert found.get("T5Config", "mlp") == [1]
    assert found.get("Other", "emb_dim") == 9
