"""Flags that `eval` and `infer` share. Nothing heavy is imported, so that help comes at once."""

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
"""Flags that some strategies have and others have not."""

_DECODING_FLAGS = (
    Flag("beam_size", "beam: sequences kept at every step, 4.", {"type": int}),
    Flag(
        "length_penalty",
        "beam: scores are sums of log-probabilities over length ** length_penalty, 1.",
        {"type": float},
    ),
    Flag(
        "num_results",
        "beam and sampling: predictions for each input; all beams, or 1.",
        {"type": int},
    ),
    Flag("temperature", "sampling: logits are divided by it, 1.", {"type": float}),
    Flag("top_k", "sampling: only among so many likeliest tokens.", {"type": int}),
    Flag("top_p", "sampling: only among the likeliest tokens of this mass.", {"type": float}),
    Flag("seed", "sampling: which draws, 0.", {"type": int}),
    Flag("max_length", "longest prediction in tokens; by default as in training.", {"type": int}),
    Flag("max_input_length", "longest input in tokens; by default as in training.", {"type": int}),
    Flag(
        "long_inputs",
        "truncate (the default) cuts and counts inputs that are longer; refuse stops.",
        {"choices": list(LONG_INPUTS)},
    ),
    Flag("batch_size", "inputs decoded together, 32; changes no result.", {"type": int}),
)

PREDICT_FLAGS = (
    Flag("strategy", "greedy (the default), sampling or beam.", {"choices": list(STRATEGIES)}),
    *_DECODING_FLAGS,
)
"""Flags of `eval`."""

INFER_FLAGS = (
    Flag(
        "strategy",
        "rank, among the labels of the task (the default for a task that has labels); or greedy, "
        "sampling or beam, which generate an answer.",
        {"choices": [RANK, *STRATEGIES]},
    ),
    *_DECODING_FLAGS,
    Flag(
        "raw",
        "sends inputs as they are; by default they are written as in training, with the prefix "
        "and the fields of the task.",
        {"action": "store_true"},
    ),
    Flag(
        "format",
        "of a model trained on several tasks: the task whose inputs are given.",
    ),
)
"""Flags of `infer`."""

EMA_FLAG = Flag(
    "ema",
    "takes the average of the model over its updates, where the run kept one.",
    {"action": "store_true"},
)
