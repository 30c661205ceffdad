"""Shows what a configuration builds and costs, before anything runs: `python -m convt5.inspect`.

Layers with receptive fields, parameters, FLOPs, memory, shardings; and examples of its data.
"""

import sys

if __name__ == "inspect":  # The standard library's `inspect` was meant.
    print(
        f"error: Python looks for modules in {sys.path[0] or 'this folder'!r} first, which hides "
        "its own; run commands as `python -m convt5.NAME`, not as files, and from another folder.",
        file=sys.stderr,
    )
    raise SystemExit(2)

from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import command_line

_NUMBER = {"type": int, "default": None}

COMMAND = command_line.Command(
    name="inspect",
    summary="Reports on a model or run without building it: receptive field, parameters and "
    "FLOPs of each layer, totals, memory, and the sharding of parameters; for a run "
    "also the amount of data, and examples. With --topology, also compiles the training "
    "step for TPUs or GPUs; this machine needs none.",
    examples=[
        ("inspect a model", "--gin_file=gin/models/dynamic_base.gin"),
        (
            "inspect a run: model, lengths, batch, optimizer, mesh, and three training examples",
            "--gin_file=gin/runs/quickstart.gin --examples=3",
        ),
        (
            "plan for longer sequences, and parameters sharded over 8 devices",
            "--gin_file=gin/runs/pretrain_c4.gin --encoder_length=4096 --devices=8 "
            "--gin.sharding.MeshConfig.data=1 --gin.sharding.MeshConfig.fsdp=8",
        ),
        (
            "compile the training step for 16 TPU chips, and report its costs",
            "--gin_file=gin/models/dynamic_base.gin --topology=v5e:4x4 "
            "--gin.sharding.MeshConfig.fsdp=4",
        ),
        (
            "measure the receptive field of a trained model by gradients, as a table and a plot",
            "--gin_file=runs/corpus/config.gin --measure --checkpoint=runs/corpus "
            "--plot=receptive_field.png",
        ),
        (
            "find widths with the parameters, or FLOPs, of another model",
            "--gin_file=gin/models/dynamic_base.gin --pair_with=gin/models/t5_base.gin",
        ),
        (
            "prove that no padding, later target or other example leaks, here and on two meshes",
            "--gin_file=gin/models/dynamic_tiny.gin --prove --mesh=data=2,fsdp=2 --mesh=sequence=2",
        ),
        ("print JSON", "--gin_file=gin/models/wavenet_base.gin --json"),
    ],
    flags=[
        command_line.Flag(
            "examples",
            "number of decoded training examples to show; needs TensorFlow.",
            {"type": int},
        ),
        command_line.Flag(
            "encoder_length",
            "tokens per encoder row (default: as in the training data, or 512).",
            _NUMBER,
        ),
        command_line.Flag(
            "decoder_length",
            "tokens per decoder row (default: as in the training data, or 114).",
            _NUMBER,
        ),
        command_line.Flag(
            "batch_size", "rows per update (default: as in the run, or 128).", _NUMBER
        ),
        command_line.Flag(
            "devices", "number of devices to plan for (default: those of this machine).", _NUMBER
        ),
        command_line.Flag(
            "topology",
            "compiles the training step for a TPU slice, such as v5e:4x4 or v5p:2x2x1, or for "
            "GPUs, such as h100:8; reports its memory, FLOPs, bytes accessed and collectives. "
            "Needs the extra tpu or gpu.",
        ),
        command_line.Flag(
            "gradients_only",
            "with --topology: compiles the loss and gradients of one microbatch, without the "
            "update.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "measure",
            "also measures the receptive field of each layer by gradients, at initialisation or "
            "for --checkpoint: the distances that contain 50, 95 and 99 percent of the gradient.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "prove",
            "also proves that no output depends on later targets, other packed examples, "
            "padding or other rows, that decoding equals teacher forcing, and that no layer "
            "reads beyond its stated receptive field. If a proof fails, names the layer and "
            "exits with code 1.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "mesh",
            "with --prove: also proves that this mesh of emulated devices, such as "
            "fsdp=2,tensor=2, computes the same update as one device; may be repeated.",
            {"action": "append"},
        ),
        command_line.Flag(
            "checkpoint", "with --measure or --prove: a run directory, or one of its steps."
        ),
        command_line.Flag(
            "plot",
            "with --measure: plots the receptive field to this file: field.png, .svg or .pdf.",
            {"type": command_line.path},
        ),
        command_line.Flag(
            "pair_with",
            "a gin file of another model: also finds the widths at which this model has as many "
            "parameters as the other, and those at which it has as many FLOPs.",
        ),
        command_line.Flag(
            "multiple",
            "with --pair_with: both widths are multiples of this (default: 128, or "
            "8 below 256 channels).",
            _NUMBER,
        ),
        command_line.Flag("json", "prints JSON instead of text.", {"action": "store_true"}),
    ],
)


def main(argv: Sequence[str]) -> int:
    """Prints the report that the command line requests; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    _check_flags(vars(arguments.flags))
    # Deferred, so that help and usage errors are fast.
    from convt5.analysis import inspect_command

    return inspect_command.run(arguments)


def _check_flags(flags: Mapping[str, Any]) -> None:
    faults = [
        f"--{name}={value} must be at least 1."
        for name, value in flags.items()
        if isinstance(value, int) and not isinstance(value, bool) and value < 1
    ]
    if flags["gradients_only"] and not flags["topology"]:
        faults.append("--gradients_only needs --topology, such as v5e:2x2; add it.")
    needed = {"checkpoint": ["measure", "prove"], "plot": ["measure"], "mesh": ["prove"]}
    faults += [
        f"--{name}={value} is for --{' or --'.join(others)}; add it."
        for name, others in needed.items()
        for value in (flags[name] if name == "mesh" else [flags[name]]) or []
        if value and not any(flags[other] for other in others)
    ]
    if flags["multiple"] and not flags["pair_with"]:
        faults.append(f"--multiple={flags['multiple']} is for --pair_with; add it.")
    if flags["topology"] and flags["devices"]:
        faults.append(
            f"--devices={flags['devices']} and --topology={flags['topology']} both set the "
            "number of devices; give one of them."
        )
    errors.raise_all(faults, where="flags")


if __name__ == "__main__":
    command_line.run(main)
