"""The README.md of an exported model: description, data, metrics, licence, usage.

Data and metrics come from the run directory; what is not recorded there, or only of another step,
is called unknown.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from convt5 import errors
from convt5.interchange import run_files
from convt5.interchange.mapping import Imported
from convt5.interchange.operative_config import OperativeConfig
from convt5.reports import markdown
from convt5.runtime import folders, foreign_files
from convt5.text import task_format

FILE = "README.md"

_NO_LICENCE = "not stated by whoever exported them"

_FIGURES = {
    "train_loss": "cross-entropy in training, nats per token",
    "validation_loss": "cross-entropy on validation data, nats per token",
    "target_unigram_entropy": "unigram entropy of the validation targets, nats per token",
}


def text(
    imported: Imported,
    *,
    origin: str,
    licence: str | None,
    needs_code: bool,
    has_tokenizer: bool,
    longest: int | None = None,
    others: Sequence[str] = (),
) -> str:
    """Returns the model card.

    Args:
        imported: the model.
        origin: the run directory or folder from which it was read.
        licence: licence of the weights, an identifier such as "apache-2.0"; None if unknown.
        needs_code: whether transformers needs the PyTorch file in the folder.
        has_tokenizer: whether the folder has a tokenizer of transformers.
        longest: tokens of the longest answer in training, if known.
        others: further runs that the model is the mean of.
    """
    trust = ", trust_remote_code=True" if needs_code else ""
    return (
        "\n".join(
            [
                *_front_matter(licence),
                "# A model of convt5",
                "",
                *_description(imported),
                "",
                *_inputs(origin),
                "```python",
                *(_use(trust, longest) if has_tokenizer else _use_of_ids(trust)),
                "```",
                "",
                "## Data",
                "",
                *dict.fromkeys(line for each in (origin, *others) for line in _data(each)),
                "",
                "## Metrics",
                "",
                *(
                    ["Not recorded for this mean."]
                    if imported.mean
                    else _metrics(origin, step=imported.step)
                ),
                "",
                "## Licence",
                "",
                f"Weights: {markdown.code(licence) if licence else _NO_LICENCE}.",
                *(["The file `modeling_convt5.py` is part of convt5: Apache-2.0."] * needs_code),
            ]
        )
        + "\n"
    )


def _use(trust: str, longest: int | None) -> list[str]:
    limit = "" if longest else ", max_new_tokens=50"  # generation_config.json has a known length.
    told = f"  # Up to {longest} tokens, as in training." if longest else ""
    return [
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("."{trust})  # This folder.',
        f'model = AutoModelForSeq2SeqLM.from_pretrained("."{trust})',
        'inputs = tokenizer("a text", return_tensors="pt")',
        f"print(tokenizer.decode(model.generate(**inputs{limit})[0])){told}",
    ]


def _use_of_ids(trust: str) -> list[str]:
    return [
        "from transformers import AutoModelForSeq2SeqLM",
        "",
        "# The folder has no tokenizer of transformers: the model reads and writes token ids.",
        f'model = AutoModelForSeq2SeqLM.from_pretrained("."{trust})  # This folder.',
    ]


def _front_matter(licence: str | None) -> list[str]:
    return [
        "---",
        # Quoted: YAML takes a bare `no` for false. JSON is YAML.
        f"license: {json.dumps(licence or 'unknown')}",
        "library_name: transformers",
        "pipeline_tag: text2text-generation",
        "tags: [convt5]",
        "---",
        "",
    ]


def _description(imported: Imported) -> list[str]:
    config = imported.config
    count = sum(array.size for array in imported.params.values())
    made = f" after {imported.step:,} updates"
    if imported.mean:
        made = f", the mean of {imported.mean['of']}"
    lines = [f"An encoder-decoder of {count:,} parameters{made}:", ""]
    for name, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        kinds = dict.fromkeys(layer.kind for layer in layers)
        lines.append(f"- {name}: {len(layers)} layers that mix by {', '.join(kinds)};")
    lines.append(f"- {config.emb_dim} channels, a vocabulary of {config.vocab_size}.")
    return lines


def _inputs(origin: epath.PathLike) -> list[str]:
    """Returns how the tasks of a model write their inputs, unless as plain texts."""
    lines = [
        f"- {markdown.code(each.task)}: {markdown.code(each.template())}" + each.marks
        for each in task_format.load(origin) or ()
        if each.parts and not each.is_plain
    ]
    return ["Write inputs as in training:", "", *lines, ""] if lines else []


def _data(origin: epath.PathLike) -> list[str]:
    run, mixture = folders.run_folder(origin, "config.gin"), None
    if run is not None and not run_files.is_import(origin):
        with contextlib.suppress(errors.UserError):
            settings = OperativeConfig.read(run / "config.gin")
            mixture = settings.get("DataConfig", "mixture", scope="train")
    # The settings of a run on cached rows name none; the tasks of the rows come with these.
    tasks = [mixture] if mixture else [each.task for each in task_format.load(origin) or ()]
    names = ", ".join(markdown.code(str(each)) for each in tasks)
    return [f"Trained on {names}." if names else "Not recorded."]


def _metrics(origin: epath.PathLike, *, step: int) -> list[str]:
    run = folders.run_folder(origin, "summary.json")
    summary: dict[str, Any] = (run and foreign_files.find_json(run / "summary.json")) or {}
    if summary and summary.get("step") != step:
        return ["Not recorded for this step."]
    rows = [(words, summary.get(name)) for name, words in _FIGURES.items()]
    rows.append((str(summary.get("metric")), summary.get("metric_value")))
    rows = [
        {"metric": words, "value": f"{value:.4f}"} for words, value in rows if type(value) is float
    ]
    return [markdown.table(rows) if rows else "Not recorded."]
