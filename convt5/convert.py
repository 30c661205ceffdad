"""Entry point of `python -m convt5.convert`: converts models from and to other formats."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import command_line, gin_config
from convt5.interchange.conversion import SOURCES, TARGETS, WEIGHTS, Conversion, check_destination

COMMAND = command_line.Command(
    name="convert",
    summary="Converts a model of another format into a run directory for train, eval and infer, "
    "or writes a model in another format.",
    needs_gin_file=False,
    reads_gin=False,
    examples=[
        (
            "import a released Mesh TensorFlow checkpoint, with its optimizer state",
            "--from=mesh_tf --checkpoint=lconv_base/model.ckpt-524288 "
            "--operative_config=lconv_base/operative_config.gin --optimizer "
            "--vocabulary=sentencepiece.model --output_dir=runs/lconv_base",
        ),
        (
            "import a checkpoint of T5X with the state of its optimizer",
            "--from=t5x --checkpoint=t5_1_1_base/checkpoint_1000000 --optimizer "
            "--vocabulary=sentencepiece.model --output_dir=runs/t5_base",
        ),
        (
            "import a T5 from Hugging Face",
            "--from=hf --checkpoint=t5-v1_1-base --output_dir=runs/t5_base",
        ),
        (
            "import a Vision Transformer of pycls",
            "--from=pycls --checkpoint=ViT-C-1GF.pyth --output_dir=runs/vit_c_1gf",
        ),
        (
            "export a trained T5 for Hugging Face transformers",
            "--to=hf --checkpoint=runs/t5_base --output_dir=exports/t5_base",
        ),
        (
            "export any text model for transformers, with one PyTorch file that computes it",
            "--to=transformers --checkpoint=runs/dynamic --output_dir=exports/dynamic",
        ),
        (
            "export a model to publish: weights of half the size, with a licence",
            "--to=transformers --weights=bfloat16 --license=apache-2.0 --checkpoint=runs/dynamic "
            "--output_dir=exports/release",
        ),
        (
            "export any model as safetensors with a JSON description",
            "--to=safetensors --checkpoint=runs/dynamic --output_dir=exports/dynamic",
        ),
        (
            "export the mean of runs that were fine-tuned from one model with different seeds",
            "--to=safetensors --checkpoint=runs/seed_0 --average=runs/seed_1 --average=runs/seed_2 "
            "--output_dir=exports/mean",
        ),
        (
            "export encoder and decoding step as programs that need no convt5",
            "--to=stablehlo --checkpoint=runs/dynamic --output_dir=exports/programs "
            "--encoder_length=512 --decoder_length=114",
        ),
    ],
    flags=[
        command_line.Flag(
            "from",
            f"format of the checkpoint, one of {', '.join(SOURCES)} (default: run, a run "
            "directory of convt5).",
            {"default": "run", "dest": "source"},
        ),
        command_line.Flag(
            "to",
            f"format to write, one of {', '.join(TARGETS)} (default: run).",
            {"default": "run", "dest": "target"},
        ),
        command_line.Flag(
            "checkpoint",
            "the checkpoint to read: for mesh_tf a folder or a prefix, such as "
            "model.ckpt-524288; for pycls a .npz, .safetensors or .pyth file; otherwise a "
            "folder.",
        ),
        command_line.Flag("output_dir", "the folder to create; it must not exist, or be empty."),
        command_line.Flag(
            "operative_config",
            "the operative_config.gin of a mesh_tf checkpoint, which sets tap offsets and the "
            "number of heads, or the model.gin of a t5x checkpoint (default: the one beside the "
            "checkpoint).",
        ),
        command_line.Flag(
            "optimizer",
            "also imports the optimizer state of a mesh_tf or t5x checkpoint, to continue "
            "training; otherwise the optimizer state is initialized.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "num_heads",
            "attention heads of a pycls model (default: as a .pyth file tells, or one per 64 "
            "channels).",
            {"type": int},
        ),
        command_line.Flag(
            "image_size",
            "height and width of a pycls model's images in pixels (default: from its position "
            "table).",
            {"type": int},
        ),
        command_line.Flag(
            "stem_strides",
            "strides of a pycls model's stem, such as 2,2,2,2,1 (default: as a .pyth "
            "file tells, or 2 for each convolution that adds channels).",
        ),
        command_line.Flag(
            "vocabulary",
            "the vocabulary of a text model: a SentencePiece .model file, or bytes (default: "
            "the vocabulary beside the checkpoint).",
        ),
        command_line.Flag(
            "license",
            "of the weights, for the model card of --to=transformers: an identifier such as "
            "apache-2.0.",
        ),
        command_line.TRUST_FLAG,
        command_line.Flag(
            "allow_unmapped",
            "ignores variables that belong to no known part of the model.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "dtype",
            "dtype of activations in the run: float32 (the default of an import) or bfloat16.",
        ),
        command_line.Flag(
            "weights",
            f"how the exported weights are stored, {' or '.join(WEIGHTS)} (default: float32); "
            "bfloat16 halves the file, and rounds to three digits.",
            {"default": "float32"},
        ),
        command_line.Flag(
            "step", "the step of a run to read (default: the newest).", {"type": int}
        ),
        command_line.Flag(
            "average",
            "another run of the same model and vocabulary, or another step of it: the exported "
            "parameters are the mean of all. Give the flag once for each.",
            {"action": "append", "default": []},
        ),
        command_line.Flag(
            "encoder_length",
            "input length of stablehlo programs, in tokens (default: 512, or what the model's "
            "positions reach).",
            {"type": int},
        ),
        command_line.Flag(
            "decoder_length",
            "most decoding steps of stablehlo programs (default: 114, or as few).",
            {"type": int},
        ),
    ],
)


def main(argv: Sequence[str]) -> int:
    """Converts according to the command line; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    given = vars(arguments.flags)
    names = [field.name for field in dataclasses.fields(Conversion)]
    missing = [f"--{name}" for name in ("checkpoint", "output_dir") if not given[name]]
    if missing:
        raise errors.UserError(
            f"{' and '.join(missing)} must be given; see python -m convt5.convert --help."
        )
    for name in ("checkpoint", "operative_config"):
        given[name] = given[name] and os.path.expanduser(given[name])
    given["average"] = [os.path.expanduser(path) for path in given["average"]]
    given["trust"] = arguments.trust
    conversion = Conversion(**{name: given[name] for name in names})
    destination = check_destination(conversion.output_dir)
    gin_config.import_trusted(conversion.trust)
    # Deferred, so that help and usage errors are fast.
    from convt5.interchange import converting

    print(converting.convert(conversion, destination, _features(conversion)))
    return 0


def _features(conversion: Conversion) -> Any:
    """Returns the vocabularies of --vocabulary, or None."""
    if conversion.vocabulary is None:
        return None
    from convt5.evaluation import run_settings

    return run_settings.text_features(conversion.vocabulary, trust=conversion.trust)


if __name__ == "__main__":
    command_line.run(main)
