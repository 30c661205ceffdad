"""The command `convt5 models`: lists the models of convt5, with parameters and FLOPs."""

import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import command_line, gin_files
from convt5.runtime.amounts import short_number

ENCODER_LENGTH, DECODER_LENGTH = 512, 114
"""Tokens per row in T5's pre-training: 15 % of 512 are corrupted, in spans of 3."""

COMMAND = command_line.Command(
    name="models",
    summary="Lists the models that come with convt5. FLOPs are those of one forward pass: for "
    f"text models over a row of {ENCODER_LENGTH} encoder and {DECODER_LENGTH} decoder "
    "tokens, for vision models over one image. A multiply-add counts as two.",
    needs_gin_file=False,
    reads_gin=False,
    examples=[
        ("list all models", ""),
        ("list the dynamic convolutions", "--name='dynamic*'"),
        ("print JSON", "--name='*_base' --json"),
    ],
    flags=[
        command_line.Flag(
            "name", "lists only names that match this pattern; * matches any characters."
        ),
        command_line.Flag("json", "prints JSON.", {"action": "store_true"}),
    ],
)


def main(argv: Sequence[str]) -> int:
    flags = command_line.parse(COMMAND, argv).flags
    files = model_files()
    names = [name for name in files if fnmatch.fnmatchcase(name, flags.name or "*")]
    if not names:
        raise errors.UserError(
            f"name={flags.name!r} matches none of the {len(files)} models."
            f"{errors.suggest(flags.name, files)}"
        )
    rows = (describe(name, files[name]) for name in names)
    if flags.json:
        json.dump(list(rows), sys.stdout, indent=2)
        print()
    else:
        _print_table(rows, names)
    return 0


def model_files() -> dict[str, str]:
    """Returns the gin file of each model by name, sorted by name."""
    folder = gin_files.own_gin_folder() / "models"
    files = [*folder.glob("*.gin"), *(folder / "released").glob("*.gin")]
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in files)
    return {name: f"gin/models/{name}.gin" for name in names}


def describe(name: str, gin_file: str) -> dict[str, Any]:
    """Returns name, file, parameters, layers and FLOPs of a model; allocates nothing."""
    from convt5.analysis import costs
    from convt5.configuration import gin_config
    from convt5.vision import costs as vision_costs
    from convt5.vision.architecture import ViTConfig

    model = gin_config.load([gin_file], roots=["%MODEL"]).macro("MODEL")
    about: dict[str, Any] = {"name": name, "gin_file": gin_file}
    if isinstance(model, ViTConfig):
        total = vision_costs.model_cost(model).total
        return {
            **about,
            "layers": f"{model.num_layers}",
            "width": model.emb_dim,
            "parameters": total.parameters,
            "forward_flops": 2 * total.multiply_adds,
        }
    cost = costs.model_cost(model, encoder_length=ENCODER_LENGTH, decoder_length=DECODER_LENGTH)
    return {
        **about,
        "layers": f"{model.encoder.num_layers} + {model.decoder.num_layers}",
        "width": model.emb_dim,
        "parameters": cost.parameters,
        "forward_flops": cost.forward_flops,
    }


def _print_table(rows: Iterator[dict[str, Any]], names: Sequence[str]) -> None:
    width = max(map(len, names))
    print(f"{'model':<{width}}  {'layers':>7}  {'width':>5}  {'parameters':>14}  {'FLOPs':>7}")
    for row in rows:
        print(
            f"{row['name']:<{width}}  {row['layers']:>7}  {row['width']:>5}  "
            f"{row['parameters']:>14,}  {short_number(row['forward_flops']):>7}",
            flush=True,
        )
    print(f"\nuse one: --gin_file=gin/models/{names[0]}.gin after the gin file of a run")


if __name__ == "__main__":
    command_line.run(main)
