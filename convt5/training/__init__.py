"""A training run: `trainer.TrainRun` and its state, step, loop, logs and run directory."""
