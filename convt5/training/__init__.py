"""A training run: `trainer.train` and what it is given, state, step, loop, logs and folder."""
