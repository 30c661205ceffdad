"""Predictions and scores of trained models, for texts and for seqio tasks with their metrics.

`Predictor` and its parts need no TensorFlow; tasks and vocabularies do.
"""

import importlib

_LAZY = {
    "EvalConfig": "convt5.evaluation.settings",
    "PredictConfig": "convt5.evaluation.settings",
    "Prediction": "convt5.evaluation.predictor",
    "Predictor": "convt5.evaluation.predictor",
    "TaskEval": "convt5.evaluation.in_training",
    "load_predictor": "convt5.evaluation.predictor",
    "load_vocabulary": "convt5.evaluation.run_settings",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
