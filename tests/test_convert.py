"""`python -m convt5.convert`: whole directories or nothing, and runs that start from them."""

import contextlib
import json
import os
import pathlib
import shutil
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import convt5
from convt5 import convert
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions
from convt5.checkpoints.reading import find_checkpoint, fingerprint
from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.interchange import conversion, converting, hugging_face, loading, portable
from convt5.modeling.tree_paths import named_leaves
from convt5.text import vocabulary_files

with warnings.catch_warnings():  # TensorFlow's own imports warn.
    warnings.simplefilter("ignore")
    pytest.importorskip("tensorflow", reason="only TensorFlow reads its checkpoints")
import tiny_run
import word_pieces
from convt5.tasks import vocabularies
from test_hugging_face import tiny
from test_hugging_face import written as write_t5
from test_mesh_tf import small_arrays, write_checkpoint

SOURCES = np.asarray([[3, 9, 4, 1, 0]], np.int32)
TARGETS = np.asarray([[0, 7, 2]], np.int32)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "operative_config.gin").write_text("num_heads = 3\n")
    return write_checkpoint(folder / "model.ckpt-7", small_arrays())


def run(capsys, *flags: str) -> str:
    assert convert.main(flags) == 0
    return capsys.readouterr().out


def entries(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_imported_checkpoint_is_an_ordinary_run(capsys, checkpoint, tmp_path):
    out = tmp_path / "run"
    text = run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    assert "mapped    shared/embedding -> token_embedder/embedding" in text
    assert "skipped   global_step" in text
    overview, variables = (
        (out / "conversion.txt").read_text().split("\n", 1)[1].split("mapped  ", 1)
    )
    assert overview.count("note: ") > 1
    assert text.startswith(f"mapped  {variables}{overview}")
    assert {"checkpoints", "config.gin", "model.gin", "conversion.txt"} == entries(out)
    assert find_checkpoint(out).name == "7"
    model = convt5.load_model(out)
    logits = jax.jit(lambda m: m(SOURCES, TARGETS))(model)
    assert logits.shape == (1, 3, 130)
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(
        model.token_embedder.embedding[...], small_arrays()["shared/embedding"]
    )


def test_the_checkpoint_of_a_folder_is_told(capsys, checkpoint, tmp_path):
    folder = f"--checkpoint={pathlib.Path(checkpoint).parent}"
    flags = ("--from=mesh_tf", "--to=safetensors", folder)
    told = run(capsys, *flags, f"--output_dir={tmp_path / 'out'}")
    assert f"note: {checkpoint} is read, at step 7." in told


@pytest.mark.slow
def test_its_gin_files_describe_the_same_model(capsys, checkpoint, tmp_path):
    out = tmp_path / "run"
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    whole = gin_config.load([str(out / "config.gin")], roots=["%MODEL"])
    assert whole.macro("MODEL") == loading.run_config(out)
    beside = gin_config.load(
        ["gin/runs/quickstart.gin", str(out / "model.gin")],
        ["architecture.ConvT5Config.vocab_size=130"],
        roots=["%MODEL"],
    )
    assert beside.macro("MODEL") == loading.run_config(out)


def keep_bytes(prefix: str, count: int) -> None:
    shard = pathlib.Path(f"{prefix}.data-00000-of-00001")
    shard.write_bytes(shard.read_bytes()[:count])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: keep_bytes(p, 1000), "truncated"),
        (lambda p: keep_bytes(p, -4), "truncated"),
        (lambda p: keep_bytes(p, 0), "truncated"),
        (lambda p: pathlib.Path(f"{p}.data-00000-of-00001").unlink(), "its data is not"),
        (lambda p: pathlib.Path(f"{p}.index").unlink(), "does not exist"),
        (lambda p: pathlib.Path(f"{p}.index").write_bytes(b"x" * 100), "truncated"),
    ],
)
def test_damaged_files_are_named_and_nothing_is_written(
    capsys, checkpoint, tmp_path, damage, message
):
    damage(checkpoint)
    assert_refused(capsys, checkpoint, tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared/embedding": None}, "unknown architecture"),
        ({"decoder/mystery": np.zeros(3, np.float32)}, "decoder/mystery .* belongs to no part"),
        ({"decoder/rms_norm/scale": np.zeros(24, np.int8)}, "stored as int8, which is none of"),
        ({"decoder/rms_norm/scale": np.zeros(25, np.float32)}, "expected"),
        ({"shared/positional_embedding_slot_v": np.zeros((30, 24), np.float64)}, "float64"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named_and_nothing_is_written(
    capsys, tmp_path, changes, message
):
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "operative_config.gin").write_text("num_heads = 3\n")
    prefix = write_checkpoint(folder / "model.ckpt-7", small_arrays(**changes))
    assert_refused(capsys, prefix, tmp_path, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_heads = 3\nd_ff = 41", "d_ff=41 contradicts the checkpoint, where it is 40"),
        ("num_heads = 3\nnum_layers = 2\nmake_layer_stack.num_layers = %num_layers", "num_layers"),
        ("num_heads = ", "no gin statement"),
        ("d_ff = 40", "number of heads is unknown: .* --operative_config=FILE"),
        ("num_heads = 3\nAdafactorOptimizer.beta1 = 0.9", r"beta1=0\.9 is not implemented"),
        *(
            (f"num_heads = 3\n{line}", rf"operative_config=.*operative_config.gin: .*{message}")
            for line, message in (
                ("sublayer_dropout.dropout_rate = %RATE", "dropout_rate='%RATE' must be a number"),
                ("sublayer_rms_norm.epsilon = [1]", r"epsilon=\[1\] must be a number"),
                (
                    "LocalConvAttnBlock.min_relative_pos = 'a'\n"
                    "LocalConvAttnBlock.max_relative_pos = 2",
                    "min_relative_pos='a' must be an integer",
                ),
                ("AdafactorOptimizer.epsilon1 = 'a'", "epsilon1='a' must be a number"),
                ("AdafactorOptimizer.factored = 'no'", "factored='no' must be True or False"),
                ("Unitransformer.z_loss = True", "z_loss=True must be a number"),
                (
                    "learning_rate_schedule_noam.warmup_steps = 0",
                    "warmup_steps=0 must be at least 1",
                ),
            )
        ),
    ],
)
def test_a_config_that_does_not_fit_is_named_and_nothing_is_written(
    capsys, checkpoint, tmp_path, text, message
):
    (pathlib.Path(checkpoint).parent / "operative_config.gin").write_text(text)
    assert_refused(capsys, checkpoint, tmp_path, message)


def test_the_operative_config_beside_a_checkpoint_in_a_bucket_is_found(monkeypatch):
    beside = "gs://bucket/t5/operative_config.gin"
    monkeypatch.setattr(type(epath.Path(beside)), "is_file", lambda path: str(path) == beside)
    assert converting._beside("gs://bucket/t5/model.ckpt-7") == beside
    assert converting._beside("gs://bucket/other/model.ckpt-7") is None


def assert_refused(capsys, prefix, tmp_path, message: str) -> None:
    before = entries(tmp_path)
    with pytest.raises(UserError, match=message):
        run(capsys, "--from=mesh_tf", f"--checkpoint={prefix}", f"--output_dir={tmp_path}/run")
    assert entries(tmp_path) == before


@pytest.mark.slow
def test_a_conversion_that_was_killed_is_redone(capsys, checkpoint, tmp_path):
    partial = tmp_path / ".run.incomplete"
    (partial / "checkpoints" / "7").mkdir(parents=True)
    (partial / "half").write_text("written")
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={tmp_path}/run")
    assert not partial.exists()
    assert entries(tmp_path / "run") == {"checkpoints", "config.gin", "model.gin", "conversion.txt"}


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def write_half():
        with converting.new_directory(tmp_path / "run") as folder:
            (folder / "half").write_text("written")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert entries(tmp_path) == set()


def test_two_conversions_into_one_directory_do_not_mix(tmp_path):
    with (
        converting.new_directory(tmp_path / "run"),
        pytest.raises(UserError, match=r"output_dir=.* is in use .* another output_dir"),
        converting.new_directory(tmp_path / "run"),
    ):
        pytest.fail("the second conversion began")
    assert (tmp_path / "run").is_dir()


def test_a_conversion_is_on_the_disk_and_its_own_until_it_is_in_its_place(tmp_path, monkeypatch):
    synced, rename = [], os.rename

    def put(partial, destination):
        assert (partial / "inside" / "weights").stat().st_ino in synced
        with (
            pytest.raises(UserError, match=r"output_dir=.* is in use"),
            converting.new_directory(destination),
        ):
            pytest.fail("another conversion began, and removed what is put there")
        rename(partial, destination)

    with converting.new_directory(tmp_path / "run") as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "weights").write_text("whole")
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
        monkeypatch.setattr(os, "rename", put)
    assert entries(tmp_path / "run") == {"inside"}


def test_an_output_directory_in_use_is_left_alone(capsys, checkpoint, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"output_dir=.* is in use: it holds 'notes\.txt'"):
        run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    assert entries(out) == {"notes.txt"}


@pytest.mark.parametrize("source", ["t5x", "transformers", "hf", "pycls", "safetensors"])
def test_a_model_in_a_bucket_that_must_be_copied_first_is_named(source, tmp_path):
    flags = (f"--from={source}", f"--output_dir={tmp_path}/out")
    with pytest.raises(UserError, match=r"gs://bucket/model must be a local folder.*copy it"):
        convert.main([*flags, "--checkpoint=gs://bucket/model"])


def test_an_output_directory_in_a_bucket_or_a_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="must be a local folder"):
        conversion.check_destination("gs://bucket/run")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        conversion.check_destination(str(tmp_path / "file"))


@pytest.mark.parametrize("target", ["run", "absent"])
@pytest.mark.parametrize("below", ["", "inner/run"])
def test_a_link_to_itself_or_to_nothing_is_refused_before_the_model_is_read(
    capsys, target, below, tmp_path
):
    (tmp_path / "run").symlink_to(tmp_path / target)
    out = tmp_path / "run" / below
    with pytest.raises(UserError, match=r"output_dir=.*/run is a link to itself or to nothing"):
        run(capsys, "--from=mesh_tf", "--checkpoint=no_model", f"--output_dir={out}")
    assert entries(tmp_path) == {"run"}


def test_an_output_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output_dir=.*run cannot be made: .*file is no folder"):
        conversion.check_destination(str(tmp_path / "file" / "run"))


def test_a_file_system_on_which_nothing_can_be_made_is_told():
    with (
        pytest.raises(UserError, match=r"output_dir=.* must be a folder that can be written"),
        converting.new_directory(pathlib.Path("/proc/run")),
    ):
        pytest.fail("the folder was made")


def test_the_root_is_no_output_directory():
    with pytest.raises(UserError, match=r"output_dir=/ (is in use|cannot be made)"):
        conversion.check_destination("/")


def test_an_empty_output_directory_is_filled(capsys, checkpoint, tmp_path):
    (tmp_path / "run").mkdir()
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={tmp_path}/run")
    assert "config.gin" in entries(tmp_path / "run")


def test_a_link_to_an_empty_output_directory_is_filled(capsys, checkpoint, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={tmp_path}/run")
    assert (tmp_path / "run").is_symlink()
    assert "config.gin" in entries(tmp_path / "disk")


@pytest.mark.slow
def test_no_length_of_programs_is_taken_for_another(capsys, checkpoint, tmp_path):
    out, export = tmp_path / "run", tmp_path / "export"
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    flags = ("--to=stablehlo", f"--checkpoint={out}", f"--output_dir={export}")
    with pytest.raises(UserError, match="encoder_length=0 must be at least 1"):
        run(capsys, *flags, "--encoder_length=0", "--decoder_length=4")
    assert not export.exists()


@pytest.mark.slow
def test_t5_goes_from_hugging_face_to_a_run_and_back_bit_for_bit(capsys, tmp_path):
    (tmp_path / "t5").mkdir()
    write_t5(tmp_path / "t5", tiny())
    (tmp_path / "t5" / "spiece.model").write_bytes(word_pieces.trained_model())
    out, back = tmp_path / "run", tmp_path / "back"
    run(capsys, "--from=hf", f"--checkpoint={tmp_path}/t5", f"--output_dir={out}")
    run(capsys, "--to=hf", f"--checkpoint={out}", f"--output_dir={back}")
    for name in ("model.safetensors", "spiece.model"):
        assert (tmp_path / "t5" / name).read_bytes() == (back / name).read_bytes()
    assert hugging_face.read_model(back).config == tiny()


def test_a_tilde_is_the_home_folder(capsys, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("--checkpoint=~/original/model.ckpt-7", "--output_dir=~/run")
    config = "--operative_config=~/original/operative_config.gin"
    run(capsys, "--from=mesh_tf", *flags, config)
    assert find_checkpoint(tmp_path / "run").name == "7"


def test_a_vocabulary_is_kept_beside_the_model(capsys, checkpoint, tmp_path):
    (tmp_path / "words.model").write_bytes(word_pieces.trained_model())
    out, export = tmp_path / "run", tmp_path / "export"
    flags = ("--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    with pytest.raises(UserError, match="the vocabulary has 359 ids, sentinels included, but the"):
        run(capsys, *flags, "--vocabulary=bytes")
    assert not out.exists()
    run(capsys, *flags, f"--vocabulary={tmp_path}/words.model")
    (tmp_path / "words.model").unlink()
    run(capsys, "--to=safetensors", f"--checkpoint={out}", f"--output_dir={export}")
    for model in (out, out / "checkpoints" / "7", export):
        assert convt5.load_vocabulary(model).vocab_size == 125


def test_a_folder_named_as_vocabulary_brings_those_of_inputs_and_of_targets(capsys, tmp_path):
    write_t5(tmp_path, tiny(vocab_size=400))
    text = vocabulary_files.KeptText(
        vocabulary_files.KeptVocabulary("sentencepiece", 100, word_pieces.trained_model()),
        vocabulary_files.KeptVocabulary("characters", 100),
        add_eos=False,
    )
    vocabulary_files.write(tmp_path / "other" / vocabulary_files.FOLDER, text)
    # The lengths of rows are those of the model.
    own = text._replace(inputs=text.targets, encoder_length=24, decoder_length=6)
    vocabulary_files.write(tmp_path / vocabulary_files.FOLDER, own)
    flags = (f"--vocabulary={tmp_path}/other", f"--output_dir={tmp_path}/out")
    run(capsys, "--from=hf", "--to=safetensors", f"--checkpoint={tmp_path}", *flags)
    assert vocabulary_files.load(tmp_path / "out") == own._replace(inputs=text.inputs)


@pytest.mark.slow
def test_a_named_vocabulary_that_replaces_another_is_told(capsys, tmp_path):
    write_t5(tmp_path, tiny(vocab_size=400))
    (tmp_path / "spiece.model").write_bytes(word_pieces.trained_model())
    (tmp_path / "same.model").write_bytes(word_pieces.trained_model())
    for name, count in ((f"{tmp_path}/same.model", 0), ("bytes", 1)):
        flags = (f"--checkpoint={tmp_path}", f"--output_dir={tmp_path / name[-5:]}")
        told = run(capsys, "--from=hf", *flags, f"--vocabulary={name}")
        assert told.count(f"note: vocabulary={name} (characters ") == count
        assert told.count("replaces the vocabulary") == count


def test_a_run_goes_to_safetensors_and_back(capsys, checkpoint, tmp_path):
    out, export, again = tmp_path / "run", tmp_path / "export", tmp_path / "again"
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    run(capsys, "--to=safetensors", f"--checkpoint={out}", f"--output_dir={export}")
    run(capsys, "--from=safetensors", f"--checkpoint={export}", f"--output_dir={again}")
    first, second = loading.read_run(out), loading.read_run(again)
    assert first.config == second.config == portable.read_model(export).config
    assert first.step == second.step == 7
    for path, value in first.params.items():
        assert value.tobytes() == second.params[path].tobytes()


def save_run(folder, model, step=3):
    """Writes one step of a run directory, as far as a conversion reads it."""
    state = types.SimpleNamespace(model=model, opt_state={}, step=jnp.asarray(step, jnp.int32))
    config = CheckpointConfig()
    with contextlib.closing(
        Checkpointer(folder / "checkpoints", config, model_config=model.config)
    ) as checkpointer:
        checkpointer.save(step, state, data=DataPositions())
    return str(folder)


@pytest.mark.parametrize(("scale", "is_far"), [(0.1, False), (1.0, True)])
def test_the_mean_of_runs_is_that_of_their_parameters(capsys, tmp_path, scale, is_far):
    shared = tiny_run.make_model(0)
    models = [
        jax.tree.map(lambda a, b: a + scale * b, shared, tiny_run.make_model(seed))
        for seed in (1, 2, 3)
    ]
    runs = [save_run(tmp_path / str(i), model) for i, model in enumerate(models)]
    others = [f"--average={path}" for path in runs[1:]]
    flags = [f"--checkpoint={runs[0]}", *others, f"--output_dir={tmp_path / 'mean'}"]
    told = run(capsys, "--to=safetensors", *flags)
    found = portable.read_model(tmp_path / "mean").params
    trees = [dict(named_leaves(model)) for model in models]
    for name, value in found.items():
        np.testing.assert_allclose(value, sum(t[name] for t in trees) / 3, rtol=1e-5, atol=1e-6)
    of_all = [np.concatenate([np.ravel(tree[name]) for name in found]) for tree in trees]
    mean = np.mean(of_all, axis=0)
    squares = np.mean([np.square(each - mean).sum() for each in of_all])
    distance = np.sqrt(squares) / np.linalg.norm(mean)
    assert f"of 3 runs, which lie {distance:.0%} of its norm from the mean" in told
    assert ("measure the mean before you use it" in told) == is_far


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "is there twice; name each run once"),
        ({"emb_dim": 16}, r"holds another model than .*emb_dim: 8 -> 16"),
        ({"dropout_rate": 0.5, "dtype": "bfloat16"}, ""),
    ],
)
def test_a_mean_is_of_different_runs_of_one_architecture(capsys, tmp_path, changes, message):
    first = save_run(tmp_path / "first", tiny_run.make_model(0))
    other = first
    if changes is not None:
        other = save_run(tmp_path / "other", tiny_run.make_model(1, **changes))
    flags = [f"--checkpoint={first}", f"--average={other}", f"--output_dir={tmp_path / 'mean'}"]
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        run(capsys, "--to=safetensors", *flags)
    assert (tmp_path / "mean").exists() == (not message)


def test_a_mean_tells_whether_it_is_of_runs_or_of_steps_of_one(capsys, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for step in (3, 4):
        save_run(one, tiny_run.make_model(step), step)
    save_run(other, tiny_run.make_model(5), 4)
    summary = {"step": 4, "train_loss": 0.25}
    (one / "summary.json").write_text(json.dumps(summary))
    steps = [one / "checkpoints" / str(step) for step in (3, 4)]
    for number, (paths, words) in enumerate(
        (
            ([one, steps[0]], "2 checkpoints of one run, at steps 4, 3"),
            ([one, steps[0], other], "3 checkpoints of 2 runs, at steps 4, 3, 4"),
            ([steps[0], other], "2 runs, at steps 3, 4"),
            ([one, other], "2 runs"),
        )
    ):
        flags = [f"--checkpoint={paths[0]}", *(f"--average={path}" for path in paths[1:])]
        out = tmp_path / f"mean_{number}"
        told = run(capsys, "--to=safetensors", *flags, f"--output_dir={out}")
        assert f"the means of the parameters of {words}, which lie" in told
        mean = json.loads((out / "convt5.json").read_text())["mean"]
        assert mean["of"] == words
        assert mean["models"] == [fingerprint(find_checkpoint(path)) for path in paths]
    # The figures and data of the first are not those of the mean.
    for path, name in ((one, "news"), (other, "films")):
        (path / "config.gin").write_text(f"train/data.DataConfig.mixture = '{name}'\n")
    run(capsys, "--to=transformers", *flags, f"--output_dir={tmp_path / 'card'}")
    card = (tmp_path / "card" / "README.md").read_text()
    assert "parameters, the mean of 2 runs:" in card
    assert "Not recorded for this mean." in card
    assert "0.25" not in card
    assert "Trained on `news`.\nTrained on `films`.\n" in card


def test_one_checkpoint_is_not_averaged_twice(capsys, tmp_path, monkeypatch):
    first = save_run(tmp_path / "first", tiny_run.make_model(0))
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "link").symlink_to("first")
    monkeypatch.chdir(tmp_path)
    for again in ("first", "link", "copy", "first/checkpoints", "first/checkpoints/3"):
        flags = [f"--checkpoint={first}", f"--average={again}", f"--output_dir={tmp_path / 'mean'}"]
        with pytest.raises(UserError, match=f"--average={again} .* is there twice"):
            run(capsys, "--to=safetensors", *flags)
    assert not (tmp_path / "mean").exists()


def test_models_of_other_vocabularies_have_no_mean(capsys, tmp_path):
    runs = [save_run(tmp_path / name, tiny_run.make_model(0)) for name in ("first", "other")]
    for path, extra in zip(runs, (100, 90), strict=True):
        kept = vocabulary_files.of(vocabularies.characters(extra))
        vocabulary_files.write(
            epath.Path(path) / vocabulary_files.FOLDER, vocabulary_files.KeptText(kept, kept)
        )
    flags = [f"--checkpoint={runs[0]}", f"--average={runs[1]}", f"--output_dir={tmp_path / 'm'}"]
    with pytest.raises(UserError, match=r"--average=.*other has another vocabulary"):
        run(capsys, "--to=safetensors", *flags)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_whoever_may_read_new_files_may_read_those_of_an_export(capsys, checkpoint, tmp_path):
    out = tmp_path / "run"
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    for to in ("safetensors", "transformers"):
        export = tmp_path / to
        run(capsys, f"--to={to}", f"--checkpoint={out}", f"--output_dir={export}")
        (new := tmp_path / f"new_{to}").touch()
        files = [path for path in export.rglob("*") if path.is_file()]
        assert {path.stat().st_mode for path in files} == {new.stat().st_mode}


@pytest.mark.slow
def test_a_checkpoint_by_another_name_keeps_its_step(capsys, checkpoint, tmp_path, monkeypatch):
    out, best = tmp_path / "run", tmp_path / "best"
    run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    shutil.copytree(out / "checkpoints" / "7", best)
    run(capsys, "--to=safetensors", f"--checkpoint={best}", f"--output_dir={tmp_path}/named")
    monkeypatch.chdir(best)
    run(capsys, "--to=safetensors", "--checkpoint=.", f"--output_dir={tmp_path}/here")
    assert portable.read_model(tmp_path / "named").step == 7
    assert portable.read_model(tmp_path / "here").step == 7


def test_the_dtype_of_a_run_can_be_chosen(capsys, checkpoint, tmp_path):
    flags = ["--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={tmp_path}/run"]
    run(capsys, *flags, "--dtype=bfloat16")
    assert loading.run_config(tmp_path / "run").dtype == "bfloat16"
    assert convt5.load_model(tmp_path / "run", dtype="float32").config.dtype == "float32"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from=meshtf"], "--from=meshtf must be one of .* Did you mean mesh_tf"),
        (["--from=hf", "--optimizer"], "--optimizer is for --from=mesh_tf and --from=t5x"),
        (["--to=hf", "--allow_unmapped"], "--allow_unmapped is for other formats than --from=run"),
        ([], "--from=run --to=run converts nothing"),
        (["--to=hf", "--encoder_length=3"], "are for --to=stablehlo"),
        (["--to=hf", "--encoder_length=0"], "are for --to=stablehlo"),
        (["--to=hf", "--dtype=bfloat16"], "--dtype is for activations, .* --weights=bfloat16"),
        (["--from=mesh_tf", "--gin.A=1"], "takes no gin settings"),
        (["--from=hf", "--gin_file=a.gin"], "--gin_file=a.gin: convert takes no gin settings"),
        (["--form=hf"], "unknown flag --form"),
        (["--from=hf", "--average=a"], "--average is for --from=run, not --from=hf"),
    ],
)
def test_wrong_flags_are_named(capsys, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run(capsys, f"--checkpoint={tmp_path}/x", f"--output_dir={tmp_path}/y", *flags)
    assert entries(tmp_path) == set()


def test_missing_flags_are_named_together(capsys):
    with pytest.raises(UserError, match="--checkpoint and --output_dir must be given"):
        run(capsys, "--from=hf")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        convt5.load_model(tmp_path)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        convert.main(["--help"])
    assert "--from=mesh_tf --checkpoint=lconv_base/model.ckpt-524288" in capsys.readouterr().out


@pytest.mark.slow
def test_training_continues_from_an_import(capsys, tmp_path):
    """The command line of a user: convert, then train on, with nothing but the config made."""
    from convt5 import train

    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "operative_config.gin").write_text("num_heads = 3\n")
    table = np.random.default_rng(0).normal(size=(384, 24)).astype(np.float32)
    prefix = write_checkpoint(folder / "model.ckpt-7", small_arrays(**{"shared/embedding": table}))
    out = tmp_path / "run"
    run(capsys, "--from=mesh_tf", f"--checkpoint={prefix}", f"--output_dir={out}")
    train.main(
        [
            f"--gin_file={out}/config.gin",
            "--gin.NUM_STEPS=9",
            "--gin.data.DataConfig.mixture=pydoc_span_corruption",
            "--gin.data.DataConfig.batch_size=8",
            "--gin.trainer.train.eval_num_batches=1",
        ]
    )
    assert json.loads((out / "summary.json").read_text())["step"] == 9
    assert find_checkpoint(out).name == "9"
    assert jax.tree.leaves(convt5.load_model(out))


def test_an_import_without_a_vocabulary_has_not_that_of_the_data_to_go_on_with(
    capsys, checkpoint, tmp_path
):
    out = tmp_path / "run"
    told = run(capsys, "--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    assert "no vocabulary lies beside the checkpoint" in told
    config = out / "config.gin"
    data = ("@pretraining.c4_span_corruption()", "'pydoc_span_corruption'")
    config.write_text(config.read_text().replace(*data))
    with pytest.raises(UserError, match="name the vocabulary that the model was trained with"):
        convt5.load_vocabulary(out)
    (out / "conversion.txt").unlink()  # A run of an earlier version, which kept none.
    assert convt5.load_vocabulary(out).vocab_size == 359


def test_a_damaged_vocabulary_is_named_before_anything_is_written(tmp_path):
    write_t5(tmp_path, tiny())
    (tmp_path / "spiece.model").write_bytes(word_pieces.trained_model()[:-9])
    for target in ("run", "transformers"):
        flags = ("--from=hf", f"--to={target}", f"--checkpoint={tmp_path}")
        with pytest.raises(UserError, match=r"spiece\.model cannot be read \(it is no Sentence"):
            convert.main([*flags, f"--output_dir={tmp_path}/out"])
        assert not (tmp_path / "out").exists()


@pytest.fixture
def with_words(capsys, checkpoint, tmp_path):
    """An imported run with a vocabulary of 25 pieces and 100 sentinels, and a text of its words."""
    model = tmp_path / "words.model"
    model.write_bytes(word_pieces.trained_model())
    (tmp_path / "text.txt").write_text(f"{word_pieces.TEXT}\n" * 40)
    out = tmp_path / "run"
    flags = ("--from=mesh_tf", f"--checkpoint={checkpoint}", f"--output_dir={out}")
    run(capsys, *flags, f"--vocabulary={model}")
    model.unlink()
    return out


def training(folder: pathlib.Path, *mixture: str) -> list[str]:
    return [
        f"--gin_file={folder}/config.gin",
        "--gin.NUM_STEPS=8",
        *mixture,
        "--gin.data.DataConfig.batch_size=8",
        "--gin.data.DataConfig.encoder_length=16",
        "--gin.data.DataConfig.decoder_length=8",
        "--gin.trainer.train.eval_num_batches=1",
    ]


@pytest.mark.slow
def test_an_import_goes_on_in_its_own_vocabulary_wherever_it_lies(with_words, tmp_path):
    from convt5 import train

    moved = shutil.move(with_words, tmp_path / "moved")
    text = (
        "--gin.data.DataConfig.mixture=@pretraining.text_span_corruption()",
        f"--gin.pretraining.text_span_corruption.path={tmp_path}/text.txt",
        "--gin.pretraining.text_span_corruption.validation_fraction=0.5",
    )
    before = (moved / "vocabulary" / "inputs.model").read_bytes()
    assert train.main(training(moved, *text)) == 0
    assert json.loads((moved / "summary.json").read_text())["step"] == 8
    assert (moved / "vocabulary" / "inputs.model").read_bytes() == before


@pytest.mark.parametrize("flags", [["--dry_run"], []])
@pytest.mark.slow
def test_an_import_does_not_go_on_with_ids_of_another_vocabulary(with_words, flags, tmp_path):
    from convt5 import train

    (tmp_path / "other.model").write_bytes(word_pieces.trained_model(word_pieces.TEXT[::-1]))
    other = (
        "--gin.data.DataConfig.mixture=@pretraining.text_span_corruption()",
        f"--gin.pretraining.text_span_corruption.path={tmp_path}/text.txt",
        "--gin.pretraining.text_span_corruption.validation_fraction=0.5",
        f"--gin.vocabularies.named.source={tmp_path}/other.model",
    )
    with pytest.raises(UserError, match="run was trained with another vocabulary of inputs"):
        train.main([*training(with_words, *other), *flags])
    assert convt5.load_vocabulary(with_words).vocab_size == 125


def test_a_name_as_long_as_can_be_is_that_of_an_export(tmp_path):
    destination = tmp_path / ("x" * 255)
    with converting.new_directory(destination) as folder:
        (folder / "file").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == [destination.name]


def test_nothing_is_removed_or_written_behind_a_link_in_the_way_of_a_conversion(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    (tmp_path / ".run.incomplete").symlink_to(tmp_path / "mine")
    with converting.new_directory(tmp_path / "run") as folder:
        (folder / "file").write_text("")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert (tmp_path / "run" / "file").is_file()
