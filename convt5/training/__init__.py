"""A training run: `trainer.TrainRun` and its parts, state, step, loop, logs and folder."""
