"""Flags shared by `eval` and `infer`. Imports nothing heavy, so that `--help` is fast."""

from convt5.runtime.flags import Flag

LONG_INPUTS = ("truncate", "refuse")
STRATEGIES = ("greedy", "sampling", "beam")
RANK = "rank"
STRATEGY_FLAGS = (
    "beam_size",
    "length_penalty",
    "num_results",
    "temperature",
    "top_k",
    "top_p",
)
"""Flags that only some strategies have."""

_DECODING_FLAGS = (
    Flag("beam_size", "beam: hypotheses kept at every step (default: 4).", {"type": int}),
    Flag(
        "length_penalty",
        "beam: a score is the sum of log-probabilities divided by length ** length_penalty "
        "(default: 1).",
        {"type": float},
    ),
    Flag(
        "num_results",
        "beam and sampling: predictions per input (default: all beams, or 1 sample).",
        {"type": int},
    ),
    Flag("temperature", "sampling: divides the logits (default: 1).", {"type": float}),
    Flag("top_k", "sampling: draws from this many most likely tokens.", {"type": int}),
    Flag(
        "top_p",
        "sampling: draws from the most likely tokens with this total probability.",
        {"type": float},
    ),
    Flag("seed", "sampling: random seed (default: 0).", {"type": int}),
    Flag("max_length", "longest prediction in tokens (default: as in training).", {"type": int}),
    Flag("max_input_length", "longest input in tokens (default: as in training).", {"type": int}),
    Flag(
        "long_inputs",
        "longer inputs: truncate (the default) shortens and counts them; refuse ends the command.",
        {"choices": list(LONG_INPUTS)},
    ),
    Flag(
        "batch_size",
        "inputs decoded together (default: 32); changes results only by rounding.",
        {"type": int},
    ),
)

PREDICT_FLAGS = (
    Flag("strategy", "greedy (the default), sampling or beam.", {"choices": list(STRATEGIES)}),
    *_DECODING_FLAGS,
)
"""Flags of `eval`."""

INFER_FLAGS = (
    Flag(
        "strategy",
        "rank scores every label of the task (the default for a task with labels); greedy, "
        "sampling and beam generate an answer.",
        {"choices": [RANK, *STRATEGIES]},
    ),
    *_DECODING_FLAGS,
    Flag(
        "raw",
        "passes inputs unchanged; by default they are formatted as in training, with the prefix "
        "and fields of the task.",
        {"action": "store_true"},
    ),
    Flag(
        "format",
        "for a model trained on several tasks: the task that the inputs belong to.",
    ),
)
"""Flags of `infer`."""

CHECKPOINT_FLAG = Flag(
    "checkpoint",
    "a run directory, one of its steps, or an exported model (default: the run_dir of the gin "
    "files). Its config.gin is read before other gin files, unless these describe a run.",
)

EMA_FLAG = Flag(
    "ema",
    "uses the exponential moving average of the parameters; the run must have kept one.",
    {"action": "store_true"},
)

TASK_FLAGS = (
    Flag(
        "task",
        "a registered seqio task or mixture; may be repeated (default: the evaluation data of "
        "the run).",
        {"action": "append"},
    ),
    Flag(
        "predict",
        "decodes and writes predictions even if no metric needs them.",
        {"action": "store_true"},
    ),
)
"""Flags of `eval` that models of images have not."""
