"""`python -m convt5.eval` on images: the numbers of training, statistics anew, a line per image."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from PIL import Image
from test_vision_training import MODEL, Stripes

import convt5
from convt5 import eval as evaluation
from convt5 import train
from convt5.data import data_shards
from convt5.errors import UserError
from convt5.evaluation import EvalConfig, PredictConfig, checkpoints, run_settings
from convt5.evaluation.images import make_plan
from convt5.modeling import sharding
from convt5.vision.augmentation import Augmentation
from convt5.vision.images import ImageDataConfig
from convt5.vision.sources import Folder, Npz
from convt5.vision.statistics import Reestimate

GIN = """# A tiny ViT_C on arrays in files.
include 'gin/runs/images.gin'
from __gin__ import dynamic_registration
from convt5.training import trainer
from convt5.training import averaging
from convt5.vision import architecture
from convt5.vision import images
architecture.ViTConfig.num_layers = 1
architecture.ViTConfig.emb_dim = 8
architecture.ViTConfig.mlp_dim = 16
architecture.ViTConfig.stem_channels = [8, 8]
architecture.ViTConfig.stem_strides = [2, 2]
trainer.train.ema = @averaging.EMA()
averaging.EMA.decay = 0.5
trainer.train.eval_every_steps = 2
images.ImageDataConfig.batch_size = 16
RUN_DIR = '{run_dir}'
DATA = '{data}'
DATASET = 'stripes'
NUM_CLASSES = 6
IMAGE_SIZE = 8
NUM_STEPS = 4
schedule.Cosine.warmup_steps = 1
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of four steps on 40 images of stripes in six classes; 21 of them are held out."""
    folder = tmp_path_factory.mktemp("eval")
    draw = np.random.default_rng(0)
    for split, size in (("train", 40), ("test", 21), ("validation", 5)):
        path = folder / "stripes" / f"{split}.npz"
        path.parent.mkdir(exist_ok=True)
        labels = np.arange(size) % 6
        images = draw.integers(0, 255, (size, 8, 8)).astype(np.uint8)
        np.savez(path, images=images, labels=labels)
    (folder / "run.gin").write_text(
        GIN.format(run_dir=folder / "run", data=folder).replace(
            "from convt5.training import trainer\n",
            "from convt5.training import schedule\nfrom convt5.training import trainer\n",
        )
    )
    assert train.main([f"--gin_file={folder}/run.gin"]) == 0
    return folder / "run"


def evaluated(run_dir, *flags, split="test"):
    assert evaluation.main([f"--checkpoint={run_dir}", *flags]) == 0
    path = run_dir / "evaluation" / "images" / split / "step_4.json"
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    return json.loads(path.read_text()), [json.loads(line) for line in lines]


def last_record(run_dir):
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.slow
def test_the_metrics_are_those_that_training_measured(run_dir, ema):
    found, lines = evaluated(run_dir, *["--ema"] * ema)
    expected = last_record(run_dir)
    for name in ("loss", "accuracy", "top_5_accuracy"):
        wanted = expected["ema/" * ema + f"validation/{name}"]
        assert found["metrics"][name] == pytest.approx(wanted, rel=1e-4)
    assert found["num_examples"] == len(lines) == 21
    assert found["split"] == "test"


@pytest.mark.slow
def test_a_line_for_each_image_holds_its_label_and_the_likeliest_classes(run_dir):
    _, lines = evaluated(run_dir, "--split=validation", "--batch_size=3", split="validation")
    model = convt5.load_model(run_dir)
    source = Npz(path=str(run_dir.parent / "stripes" / "validation.npz"))
    data = ImageDataConfig(
        source=source,
        batch_size=5,
        image_size=8,
        in_channels=1,
        num_classes=6,
        num_epochs=1,
        shuffle=False,
    )
    batch = next(data.build(process_index=0, process_count=1))
    log_probs = np.asarray(jax.nn.log_softmax(model(batch["images"]).logits))
    for number, (line, scores) in enumerate(zip(lines, log_probs, strict=True)):
        assert (line["index"], line["label"]) == (number, number % 6)
        assert line["predictions"] == np.argsort(-scores)[:5].tolist()
        np.testing.assert_allclose(line["scores"], np.sort(scores)[::-1][:5], rtol=1e-4)
        np.testing.assert_allclose(line["target_score"], scores[number % 6], rtol=1e-4)
        assert line["rank"] == np.sum(scores > scores[number % 6])


@pytest.mark.slow
def test_batch_statistics_are_measured_anew_where_asked_and_as_often_the_same(run_dir):
    saved, _ = evaluated(run_dir)
    first, _ = evaluated(run_dir, "--reestimate=3")
    again, _ = evaluated(run_dir, "--reestimate=3")
    assert first == again
    assert first["settings"]["reestimate_batches"] == 3
    assert first["metrics"]["loss"] != saved["metrics"]["loss"]
    smaller = "--gin.train/images.ImageDataConfig.batch_size=8"
    other, _ = evaluated(run_dir, "--reestimate=3", smaller)
    assert (
        first["settings"]["reestimate_data"] | {"batch_size": 8}
        == (other["settings"]["reestimate_data"])
    )
    assert other["metrics"]["loss"] != first["metrics"]["loss"]


def test_a_run_is_found_by_a_relative_path(run_dir, monkeypatch):
    expected, _ = evaluated(run_dir)
    monkeypatch.chdir(run_dir.parent)
    assert evaluation.main(["--checkpoint=run", "--split=test"]) == 0
    assert evaluated(run_dir)[0] == expected
    assert convt5.load_model("run").config.num_classes == 6


def test_the_first_images_alone_are_measured(run_dir):
    found, lines = evaluated(run_dir, "--num_examples=4", "--batch_size=3")
    assert found["num_examples"] == len(lines) == 4
    assert [line["index"] for line in lines] == [0, 1, 2, 3]


def test_a_dry_run_computes_nothing(run_dir, tmp_path, capsys):
    flags = [f"--checkpoint={run_dir}", "--dry_run", f"--output_dir={tmp_path}/out"]
    assert evaluation.main(flags) == 0
    assert "tasks        images" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task=sst2"], "--task applies to text models"),
        (["--strategy=beam"], "--strategy applies to text models"),
        (["--seed=0"], "--seed applies to text models"),
        (["--gin.evaluation.EvalConfig.every_nth=2"], "every_nth applies to text models"),
        (["--gin.evaluation.EvalConfig.tasks='sst2'"], "tasks applies to text models"),
        (["--gin.evaluation.EvalConfig.seed=1"], "EvalConfig.seed applies to text models"),
        (["--reestimate=0"], "--reestimate=0 must be at least 1"),
        (["--split=absent"], r"absent\.npz cannot be read"),
        (["--gin.NUM_CLASSES=5"], "labels run from 0 to 5"),
        (
            ["--gin.eval/images.ImageDataConfig.in_channels=3"],
            "in_channels=3 of the images differs",
        ),
        (["--gin.eval/images.ImageDataConfig.image_size=4"], "image_size=4 of the images differs"),
        (
            ["--gin.eval/images.ImageDataConfig.num_classes=7"],
            "num_classes=7 of the images is more",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_named(run_dir, flags, message):
    with pytest.raises(UserError, match=message):
        evaluation.main([f"--checkpoint={run_dir}", *flags])


@pytest.mark.slow
def test_corrupt_files_are_left_out_of_the_means_and_counted(tmp_path):
    tf = pytest.importorskip("tensorflow", reason="only TensorFlow decodes image files")
    for index in range(4):
        path = tmp_path / "images" / "abc"[index % 3] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.full((8, 8, 1), 9 * index, np.uint8)).numpy())
    (tmp_path / "images" / "a" / "3.png").write_bytes(b"no image")
    data = ImageDataConfig(
        source=Folder(path=str(tmp_path / "images"), channels=1),
        batch_size=3,
        image_size=8,
        in_channels=1,
        num_classes=3,
        on_corrupt="skip",
    )
    settings = run_settings.RunSettings(
        {"train_data": data}, PredictConfig(), EvalConfig(split="validation")
    )
    plan = make_plan("a run", model=MODEL, settings=settings)
    model = MODEL.build(jax.random.key(0))
    mesh = sharding.MeshConfig().build(jax.devices()[:2])
    with pytest.warns(UserWarning, match="skipped"):
        found = plan.evaluator(plan.tasks[0])(model, mesh, 1)
    assert found.counts == {"num_examples": 3, "skipped_images": 1}
    assert [record["label_name"] for record in found.records] == ["a", "b", "c"]
    assert found.metrics["loss"] == pytest.approx(np.log(3))  # The head starts with zeros.


@dataclasses.dataclass(frozen=True)
class Named(Stripes):
    """Names its three classes."""

    def open(self, split):
        return super().open(split)._replace(class_names=("none", "rows", "columns"))


def test_a_model_may_have_more_logits_than_the_images_have_classes():
    data = ImageDataConfig(
        source=Named(), batch_size=16, image_size=8, in_channels=1, num_classes=3
    )
    config = dataclasses.replace(MODEL, num_classes=5)
    settings = run_settings.RunSettings(
        {"train_data": data}, PredictConfig(), EvalConfig(num_examples=4)
    )
    plan = make_plan("a run", model=config, settings=settings)
    mesh = sharding.MeshConfig().build(jax.devices()[:1])
    found = plan.evaluator(plan.tasks[0])(config.build(jax.random.key(0)), mesh, 1)
    # The head starts with zeros: classes come in their order.
    expected = ["none", "rows", "columns", "3", "4"]
    assert [record["prediction_names"] for record in found.records] == [expected] * 4


def test_images_of_other_classes_than_in_training_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "classes.json").write_text('{"classes": ["none", "columns"]}')
    data = ImageDataConfig(
        source=Named(), batch_size=16, image_size=8, in_channels=1, num_classes=3
    )
    settings = run_settings.RunSettings({"train_data": data}, PredictConfig(), EvalConfig())
    plan = make_plan(str(tmp_path / "checkpoints" / "4"), model=MODEL, settings=settings)
    with pytest.raises(UserError, match="label 1 is the class 'rows', but in training 'columns'"):
        plan.evaluator(plan.tasks[0])


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_results_name_the_content_of_their_images(run_dir, tmp_path, capsys, kind):
    def write(draw, path):
        images = np.random.default_rng(draw).integers(0, 255, (6, 8, 8)).astype(np.uint8)
        if kind == "npz":
            return np.savez(path / "test.npz", images=images, labels=np.arange(6))
        for label, pixels in enumerate(images):
            (path / "test" / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[: 8 - draw]).save(path / "test" / str(label) / "1.bmp")

    source, suffix = {"npz": ("Npz", ".npz"), "folder": ("Folder", "")}[kind]
    command = [
        f"--checkpoint={run_dir}",
        f"--output_dir={tmp_path}/out",
        f"--gin.SOURCE=@sources.{source}()",
        f"--gin.sources.{source}.path='{tmp_path}/{{split}}{suffix}'",
        *["--gin.sources.Folder.channels=1"] * (kind == "folder"),
    ]
    write(0, tmp_path)
    assert evaluation.main(command) == 0
    assert evaluation.main([*command, "--follow", "--timeout=0"]) == 0
    assert capsys.readouterr().out.count("step 4  images/test") == 1
    write(1, tmp_path)
    assert evaluation.main([*command, "--follow", "--timeout=0"]) == 0
    told = capsys.readouterr()
    assert "content.images: " in told.err
    assert told.out.count("step 4  images/test") == 1


@pytest.mark.parametrize("dry_run", [[], ["--dry_run"]])
def test_training_refuses_images_that_do_not_fit_the_model(run_dir, dry_run, tmp_path):
    flags = [f"--gin_file={run_dir}/config.gin", "--gin.images.ImageDataConfig.num_classes=7"]
    flags.append(f"--gin.trainer.train.run_dir={tmp_path}")
    with pytest.raises(UserError, match="num_classes=7 of the images is more than num_classes=6"):
        train.main([*flags, *dry_run])


OPENED = []


@dataclasses.dataclass(frozen=True)
class Counted(Stripes):
    """Notes when its images are opened."""

    def open(self, split):
        OPENED.append(split)
        return super().open(split)


@pytest.mark.parametrize("stem", ["conv", "patchify"])
def test_reestimation_opens_its_images_once_and_never_for_a_patchify_stem(stem):
    OPENED.clear()
    config = MODEL
    if stem == "patchify":
        config = dataclasses.replace(
            MODEL, stem="patchify", patch_size=4, stem_channels=(), stem_strides=()
        )
    data = ImageDataConfig(
        source=Counted(), batch_size=16, image_size=8, in_channels=1, num_classes=3
    )
    mesh = sharding.MeshConfig().build(jax.devices()[:1])
    model = config.build(jax.random.key(0))
    measure = Reestimate(data=data, num_batches=2).on_devices(
        checkpoints.shardings(model, mesh), sharding.batch_sharding(mesh)
    )
    first, second = measure(model), measure(model)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (len(OPENED), bool(first)) == ((0, False) if stem == "patchify" else (1, True))
    short = dataclasses.replace(data, num_epochs=1)
    if stem == "conv":
        with pytest.raises(UserError, match="data ends after 6 of num_batches=9"):
            Reestimate(data=short, num_batches=9).on_devices(
                checkpoints.shardings(model, mesh), sharding.batch_sharding(mesh)
            )(model)


ASKED = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noted(ImageDataConfig):
    """Notes into how many shards it is cut."""

    def build(self, *, process_index, process_count):
        ASKED.append(process_count)
        return super().build(process_index=process_index, process_count=process_count)


def test_reestimation_reads_unmixed_images_and_the_same_ones_on_any_number_of_hosts(monkeypatch):
    known = {"batch_size": 16, "image_size": 8, "in_channels": 1, "num_classes": 3}
    mixing = Augmentation(flip=True, mixup_alpha=0.8, cutmix_alpha=1.0)
    alone = dataclasses.replace(mixing, mixup_alpha=0.0, cutmix_alpha=0.0)
    mesh = sharding.MeshConfig().build(jax.devices()[:1])
    model = MODEL.build(jax.random.key(0))
    placed = checkpoints.shardings(model, mesh), sharding.batch_sharding(mesh)

    def measured(augmentation):
        data = Noted(source=Stripes(), augmentation=augmentation, **known)
        return Reestimate(data=data, num_batches=2).on_devices(*placed)(model)

    # As if there were two hosts, whose rows are read here.
    monkeypatch.setattr(data_shards.HostRows, "default_num_shards", lambda _: 2)
    ASKED.clear()
    jax.tree.map(np.testing.assert_array_equal, measured(mixing), measured(alone))
    assert ASKED == [1, 1]
