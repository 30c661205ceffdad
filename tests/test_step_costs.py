"""Parts of a training step are those of the model, and add up to its table."""

import pytest
import step_costs

from convt5 import bench, errors
from convt5.analysis import costs

TINY = [
    f"architecture.ConvT5Config.{name}={value}"
    for name, value in {
        **{"emb_dim": 32, "mlp_dim": 64, "num_heads": 2, "head_dim": 8, "vocab_size": 48},
    }.items()
]


def test_parts_have_the_operations_of_the_model():
    (config,) = bench._models(["gin/models/dynamic_tiny.gin"], TINY).values()
    parts = list(step_costs.parts(config, 64, 3))
    cost = costs.model_cost(config, encoder_length=64, decoder_length=16)
    flops = sum(part.count * part.flops for part in parts)
    # Softmaxes and norms are not counted by part.
    assert flops == pytest.approx(3 * cost.training_flops, rel=0.02)
    by_name = {part.name for part in parts}
    assert {"dense layers", "convolutions", "attention", "norms and residuals"} < by_name


@pytest.mark.slow
def test_shares_of_a_step_add_up(capsys):
    bindings = [f"--gin.{each}" for each in [*TINY, "architecture.StackConfig.num_layers=1"]]
    flags = ["--lengths", "8", "--repeats=1", "--batch_size=1"]
    step_costs.main(["--gin_file=gin/models/dynamic_tiny.gin", *flags, *bindings])
    _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    milliseconds = {row[0]: float(row[2]) for row in cells if "-" not in row[0][:1]}
    step = milliseconds.pop("step")
    assert sum(milliseconds.values()) == pytest.approx(step, abs=0.1 * len(milliseconds))


def test_models_of_other_layers_are_refused():
    with pytest.raises(errors.UserError, match="has other layers than dynamic convolutions"):
        step_costs.main(["--gin_file=gin/models/t5_tiny.gin"])
