"""A run that is killed with no warning, and started again, ends as if nothing had happened.

Real processes and the real command: what is killed reads real text, what is stopped reads numbers.
"""

import json
import signal
import subprocess
import sys

import commands
import counting_run
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from quick import quick

NUM_STEPS = 40

SETTINGS = f"""
include 'gin/models/dynamic_tiny.gin'
from __gin__ import dynamic_registration
from convt5.modeling import architecture
from convt5.checkpoints import checkpoint
from convt5 import data
from convt5.training import losses
from convt5.training import optimizer
from convt5.training import schedule
from convt5.training import trainer

architecture.ConvT5Config.vocab_size = 384
architecture.ConvT5Config.emb_dim = 8
architecture.ConvT5Config.mlp_dim = 16
architecture.ConvT5Config.num_heads = 2
architecture.ConvT5Config.head_dim = 4
architecture.ConvT5Config.dropout_rate = 0.1
architecture.ConvT5Config.dtype = 'float32'
architecture.StackConfig.num_layers = 1
checkpoint.CheckpointConfig.every_steps = 10
data.DataConfig.mixture = 'pydoc_span_corruption'
data.DataConfig.batch_size = 4
data.DataConfig.encoder_length = 32
data.DataConfig.decoder_length = 16
train/data.DataConfig.split = 'train'
eval/data.DataConfig.split = 'validation'
schedule.InverseSqrt.warmup_steps = 100
trainer.train.checkpoint = @checkpoint.CheckpointConfig()
trainer.train.run_dir = %RUN_DIR
trainer.train.model = %MODEL
trainer.train.loss = @losses.TextLoss()
trainer.train.optimizer = @optimizer.AdamWConfig()
trainer.train.schedule = @schedule.InverseSqrt()
trainer.train.num_steps = {NUM_STEPS}
trainer.train.train_data = @train/data.DataConfig()
trainer.train.eval_data = @eval/data.DataConfig()
trainer.train.eval_every_steps = 20
trainer.train.eval_num_batches = 2
trainer.train.log_every_steps = 1
RUN_DIR = %gin.REQUIRED
"""

ENDLESS = f"""{counting_run.SETTINGS}
NUM_STEPS = 100_000
SAVE_EVERY = 100_000
trainer.train.eval_every_steps = 100_000
"""
"""A run that begins at once, and is not over before it is stopped."""


ONE_AFTER_ANOTHER = """
import sys
from convt5 import train
for run_dir in sys.argv[2:]:
    assert train.main([sys.argv[1], f"--gin.RUN_DIR={run_dir}"]) == 0
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Starts training in a run directory, or in several in turn, in a process of its own."""
    folder = tmp_path_factory.mktemp("resume")
    environment = counting_run.environment() | {"XDG_CACHE_HOME": str(folder / "cache")}

    def start(*run_dirs, text=SETTINGS):
        (settings := folder / "run.gin").write_text(text)
        train = ["-m", "convt5.train", f"--gin_file={settings}", f"--gin.RUN_DIR={run_dirs[0]}"]
        in_turn = ["-c", ONE_AFTER_ANOTHER, f"--gin_file={settings}", *run_dirs]
        return commands.start(
            [sys.executable, *(in_turn if len(run_dirs) > 1 else train)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return start


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def stop_when(process, condition, *, with_signal=signal.SIGKILL):
    """Sends a signal as soon as the condition holds; fails if the process ended before."""
    commands.wait_until(condition, process)
    process.send_signal(with_signal)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def count_records(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_saving(run_dir, *, from_step):
    names = [path.name for path in run_dir.glob("checkpoints/*tmp*")]
    return any(int(name.split(".")[0]) >= from_step for name in names)


def read_all(run_dir):
    """Everything the last checkpoint holds but the data position, and the records."""
    with ocp.StandardCheckpointer() as reader:
        folder = run_dir / "checkpoints" / str(NUM_STEPS)
        trees = [reader.restore(folder / part) for part in ("params", "optimizer")]
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return trees, [json.loads(line) for line in lines]


def losses(records):
    return [(r["loss"], r.get("validation/loss")) for r in records]


@pytest.mark.slow
@pytest.mark.parametrize("number", quick([signal.SIGINT, signal.SIGHUP], chosen=[signal.SIGHUP]))
def test_a_run_whose_output_nobody_reads_any_more_saves_when_it_is_stopped(
    launch, tmp_path, number
):
    run_dir = tmp_path / "run"
    process = launch(run_dir, text=ENDLESS)
    commands.wait_until(lambda: count_records(run_dir) > 0, process)
    process.stdout.close()  # As after `2>&1 | tee log`, which Ctrl-C ends too.
    for _ in range(2 if number == signal.SIGHUP else 1):
        process.send_signal(number)
    assert process.wait(timeout=300) == 128 + number
    (saved,) = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert 1 <= int(saved) == count_records(run_dir)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_killed_run_ends_bit_for_bit_as_one_left_alone(launch, tmp_path):
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    code, _ = stop_when(launch(run_dir), lambda: is_saving(run_dir, from_step=20))
    assert code == -signal.SIGKILL

    # The one left alone comes second, so that the other goes on in a process that has begun anew.
    output = finish(launch(run_dir, alone))
    assert output.count("resumes from the checkpoint of step") == 1
    trees, records = read_all(run_dir)
    expected_trees, expected_records = read_all(alone)
    jax.tree.map(np.testing.assert_array_equal, trees, expected_trees)
    assert [r["step"] for r in records] == list(range(1, NUM_STEPS + 1))
    assert losses(records) == losses(expected_records)


@pytest.mark.slow
def test_a_run_asked_to_stop_saves_and_says_how_to_go_on(launch, tmp_path):
    run_dir = tmp_path / "run"
    process = launch(run_dir, text=ENDLESS)
    code, output = stop_when(
        process, lambda: count_records(run_dir) >= 5, with_signal=signal.SIGTERM
    )
    assert code == 143
    assert "repeat the command to resume" in output
    assert "Traceback" not in output
    saved = max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert f"stopped by SIGTERM after step {saved}, which is saved" in output
    # The step in progress and the one that was dispatched: no more of them were made.
    assert count_records(run_dir) == saved
