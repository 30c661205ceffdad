"""`eval --follow` beside a run that is training: every checkpoint is measured as it appears."""

import json
import os
import subprocess
import sys

import commands
import pytest

from convt5 import train

pytestmark = pytest.mark.slow

SETTINGS = """
from __gin__ import dynamic_registration
from convt5.modeling import architecture
from convt5.checkpoints import checkpoint
from convt5 import data
from convt5 import evaluation
from convt5.training import losses
from convt5.training import optimizer
from convt5.training import schedule
from convt5.training import trainer
from convt5.tasks import pretraining

MODEL = @architecture.ConvT5Config()
architecture.ConvT5Config.vocab_size = 384
architecture.ConvT5Config.emb_dim = 8
architecture.ConvT5Config.mlp_dim = 16
architecture.ConvT5Config.num_heads = 2
architecture.ConvT5Config.head_dim = 4
architecture.ConvT5Config.encoder = @architecture.StackConfig()
architecture.ConvT5Config.decoder = @architecture.StackConfig()
architecture.StackConfig.num_layers = 1
architecture.StackConfig.mixing = 'depthwise'
architecture.StackConfig.kernel_size = 3
trainer.train.run_dir = %RUN_DIR
trainer.train.model = %MODEL
trainer.train.loss = @losses.TextLoss()
trainer.train.optimizer = @optimizer.SGDConfig()
trainer.train.schedule = @schedule.InverseSqrt()
trainer.train.num_steps = 30
trainer.train.checkpoint = @checkpoint.CheckpointConfig()
checkpoint.CheckpointConfig.every_steps = 10
checkpoint.CheckpointConfig.keep_last = 3
trainer.train.train_data = @data.DataConfig()
data.DataConfig.mixture = 'pydoc_span_corruption'
data.DataConfig.batch_size = 8
data.DataConfig.encoder_length = 32
data.DataConfig.decoder_length = 16
evaluation.EvalConfig.tasks = ['pydoc_span_corruption']
evaluation.EvalConfig.num_examples = 4
RUN_DIR = %gin.REQUIRED
"""


def test_every_checkpoint_of_a_run_is_measured_and_then_it_ends(tmp_path):
    settings, run = tmp_path / "run.gin", tmp_path / "run"
    settings.write_text(SETTINGS)
    # The evaluation begins first: there is no run directory yet.
    follower = commands.start(
        [
            *(sys.executable, "-m", "convt5.eval"),
            *(f"--checkpoint={run}", "--follow", "--timeout=300"),
        ],
        env=os.environ
        | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": commands.QUICK_COMPILATION},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert train.main([f"--gin_file={settings}", f"--gin.RUN_DIR={run}"]) == 0
        output, _ = follower.communicate(timeout=300)
    finally:
        follower.kill()
    assert follower.returncode == 0, output
    results = sorted((run / "evaluation").rglob("step_*.json"))
    steps = [json.loads(path.read_text())["step"] for path in results]
    assert steps == [10, 20, 30], output
