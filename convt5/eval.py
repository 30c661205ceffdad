"""Entry point of `python -m convt5.eval`: measures checkpoints of a run on tasks or images."""

from collections.abc import Sequence

from convt5.configuration import command_line
from convt5.evaluation.flags import CHECKPOINT_FLAG, EMA_FLAG, PREDICT_FLAGS, TASK_FLAGS
from convt5.runtime import multi_host
from convt5.runtime.flags import Flag

COMMAND = command_line.Command(
    name="eval",
    summary="Evaluates a trained model. On seqio tasks it reports the metrics of the task and "
    "the loss of the targets (for rank classification, of the correct labels); on "
    "labelled images top-1 and top-5 accuracy and the loss. Accuracies are percentages. "
    "Writes metrics (JSON) and predictions (JSON lines) to "
    "RUN_DIR/evaluation/TASK/SPLIT, and scalars to RUN_DIR/evaluation/tensorboard.",
    needs_gin_file=False,
    examples=[
        (
            "evaluate the newest checkpoint of a run on its own validation data",
            "--checkpoint=runs/a",
        ),
        (
            "evaluate the best checkpoint on other tasks, with beam search",
            "--checkpoint=runs/a --step=best --task=imdb --task=trec6 --split=test "
            "--strategy=beam --beam_size=4",
        ),
        (
            "follow a run in progress: evaluate each checkpoint as it appears",
            "--checkpoint=runs/a --follow --timeout=7200",
        ),
        (
            "evaluate an image model; re-estimate its batch statistics on 64 batches first",
            "--checkpoint=runs/digits/vit_c_tiny --split=test --reestimate=64",
        ),
        (
            "evaluate the run of the train command with the same settings, on training examples",
            "--gin_file=gin/runs/quickstart.gin --gin.RUN_DIR=runs/a "
            "--gin.eval/data.DataConfig.split=train --num_examples=1000",
        ),
    ],
    flags=[
        CHECKPOINT_FLAG,
        Flag(
            "step",
            "latest (the default), best (by the run's best_metric), all, or a list of steps: "
            "100,200.",
            {"default": "latest"},
        ),
        TASK_FLAGS[0],
        Flag("split", "split of the tasks (default: the run's own split, or validation)."),
        Flag("num_examples", "evaluates only this many examples of each task.", {"type": int}),
        TASK_FLAGS[1],
        EMA_FLAG,
        Flag(
            "reestimate",
            "images: re-estimates batch statistics on this many batches of training data.",
            {"type": int},
        ),
        Flag(
            "follow",
            "evaluates checkpoints as they appear, until the run ends; skips those already "
            "evaluated with these settings.",
            {"action": "store_true"},
        ),
        Flag(
            "timeout",
            "with --follow: ends after this many seconds without a new checkpoint (default: 3600).",
            {"type": float},
        ),
        Flag("output_dir", "folder of the results (default: RUN_DIR/evaluation)."),
        *PREDICT_FLAGS,
        Flag(
            "dry_run",
            "checks checkpoints, tasks, splits, vocabularies and the paths of results; evaluates "
            "nothing.",
            {"action": "store_true"},
        ),
        *multi_host.FLAGS,
    ],
)


def main(argv: Sequence[str]) -> int:
    """Evaluates according to the command line; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    with multi_host.join(arguments.flags):
        # Deferred: JAX must join the other hosts before it computes, and help must be fast.
        from convt5.evaluation import eval_command

        return eval_command.run(arguments)


if __name__ == "__main__":
    command_line.run(main)
