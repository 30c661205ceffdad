"""The command `python -m convt5.inspect`: reports a model, its costs, its proofs and its data."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from convt5 import errors
from convt5.analysis import compiled_step, cost_report, pairing, receptive_field, topology
from convt5.analysis.cost_report import Subject
from convt5.analysis.proofs import meshes as proof_meshes
from convt5.analysis.proofs import report as proofs
from convt5.configuration import command_line, gin_config, gin_files
from convt5.generation import samples
from convt5.interchange import loading, portable
from convt5.modeling.architecture import ConvT5Config
from convt5.modeling.description import StackName
from convt5.modeling.sharding import MeshConfig
from convt5.reports import figures
from convt5.text import vocabulary_files
from convt5.training import moved_runs, trainer
from convt5.training.moved_runs import DATA_ARGUMENTS
from convt5.training.train_step import StepConfig
from convt5.training.trainer import TrainRun
from convt5.vision import costs as vision_costs
from convt5.vision.architecture import ViTConfig

DEFAULTS = {"encoder_length": 512, "decoder_length": 114, "batch_size": 128}
"""T5's pre-training lengths, used if the gin files describe a model without data."""

_MODEL_ALONE = (
    "LOSS=@losses.TextLoss()",
    "OPTIMIZER=@optimizer.AdafactorConfig()",
    "SCHEDULE=@schedule.InverseSqrt()",
    "MESH=@sharding.MeshConfig()",
)
"""Bindings that complete a model to a training step; the command line can override them."""


_OF_TEXT_MODELS = (
    *("topology", "examples", "encoder_length", "decoder_length", "batch_size", "devices"),
    *("measure", "pair_with"),
)
"""Flags that do not apply to vision models."""


class _Report:
    """Sections of text, and the same as JSON values."""

    def __init__(self, text: str, values: Mapping[str, Any]):
        self.sections, self.values = [text], dict(values)
        self.exit_code = 0

    def add(self, name: str, text: str, values: Any) -> None:
        self.sections.append(text)
        self.values[name] = values

    def add_proofs(self, proven: proofs.ProofReport) -> None:
        self.add("proofs", proven.as_text(), proven.as_json())
        self.exit_code = proven.exit_code

    def show(self, *, as_json: bool) -> None:
        if as_json:
            json.dump(self.values, sys.stdout, indent=2)
            print()
        else:
            print("\n\n".join(self.sections))


def run(arguments: command_line.Arguments) -> int:
    """Prints the requested report and checks its flags; returns the exit code."""
    flags = arguments.flags
    meshes = _emulate(flags.mesh or ())
    step, name = read_step(arguments.gin_files, arguments.gin_bindings, trust=arguments.trust)
    if isinstance(step.model, ViTConfig):
        report = _of_images(step, step.model, name, vars(flags), meshes)
    else:
        report = _of_text(step, name, flags, meshes, trust=arguments.trust)
    report.show(as_json=flags.json)
    return report.exit_code


def _emulate(texts: Sequence[str]) -> list[MeshConfig]:
    """Returns the meshes named on the command line, and emulates devices for them."""
    if not texts:
        return []
    parsed = proof_meshes.parse(texts)
    proof_meshes.emulate_devices(max(map(proof_meshes.num_devices, parsed)))
    return parsed


def _of_text(
    step: StepConfig,
    name: str,
    flags: Any,
    meshes: Sequence[MeshConfig],
    *,
    trust: Sequence[str],
) -> _Report:
    if flags.plot:
        figures.check_path(flags.plot, flag="plot")
    trained = _load(flags.checkpoint, step.model)
    target = topology.load(flags.topology) if flags.topology else None
    if target is not None:
        flags.devices = len(target.devices)
    subject = make_subject(name, step, vars(flags))
    for sentence in subject.config.unused():
        print(sentence, file=sys.stderr)
    if step.frozen:
        print(
            f"frozen={list(step.frozen)}: closed-form FLOPs and activations assume that every "
            "parameter is trained; --topology compiles the actual step.",
            file=sys.stderr,
        )
    costs = cost_report.make_report(subject)
    report = _Report(costs.as_text(), costs.as_json())
    if target is not None:
        compiling = compiled_step.Step(subject, gradients_only=flags.gradients_only)
        compiled = compiled_step.make_report(compiling, target)
        report.add("compiled_step", compiled.as_text(), compiled.as_json())
    if flags.measure:
        report.add("measured_receptive_field", *_measure(subject, flags, trained))
    if flags.pair_with:
        report.add("equal_cost", *_pair(subject, flags.pair_with, flags.multiple, trust))
    if flags.prove:
        lengths = (subject.encoder_length, subject.decoder_length)
        named = flags.checkpoint or name
        report.add_proofs(
            proofs.make_report(named, step, lengths=lengths, trained=trained, meshes=meshes)
        )
    _add_data(report, _data(step), flags.examples)
    return report


def _add_data(report: _Report, data: Any, num_examples: int | None) -> None:
    examples = decode_examples(data, num_examples) if num_examples else []
    described = _describe_data(data, is_read=bool(examples))
    if described is not None:
        report.add("data", described, described)
    report.sections += _examples_section(examples)
    report.values["examples"] = examples


def _of_images(
    step: StepConfig,
    config: ViTConfig,
    name: str,
    flags: Mapping[str, Any],
    meshes: Sequence[MeshConfig],
) -> _Report:
    """Returns the report of a vision model, which has fewer sections."""
    errors.raise_all(
        (
            f"--{flag} is for text models, and {name} is a vision model; leave it out."
            for flag in _OF_TEXT_MODELS
            if flags[flag]
        ),
        where="inspect",
    )
    values = {"name": name, **vision_costs.as_json(config)}
    report = _Report(f"{name}: {vision_costs.as_text(config)}", values)
    if flags["prove"]:
        trained = _load(flags["checkpoint"], config)
        named = flags["checkpoint"] or name
        report.add_proofs(proofs.make_report(named, step, trained=trained, meshes=meshes))
    return report


def _load(checkpoint: str | None, config: Any) -> Any:
    """Returns the model of a checkpoint, and tells how it differs from that of the gin files.

    Raises:
        UserError: one is a text model, and the other a vision model.
    """
    if checkpoint is None:
        return None
    trained: Any = loading.load_model(checkpoint)
    if type(trained.config) is not type(config):
        raise errors.UserError(
            f"--checkpoint={checkpoint} holds a {type(trained.config).__name__}, but the gin files "
            f"describe a {type(config).__name__}; give the config.gin of the run as --gin_file."
        )
    held, described = portable.describe(trained.config), portable.describe(config)
    if other := [name for name, value in held.items() if described[name] != value]:
        print(
            f"{checkpoint} holds a model that differs from that of the gin files in "
            f"{', '.join(other)}: what is proven or measured is that of {checkpoint}, and all "
            "other figures are those of the gin files.",
            file=sys.stderr,
        )
    return trained


def read_step(
    files: Sequence[str], bindings: Sequence[str], *, trust: Sequence[str] = ()
) -> tuple[StepConfig, str]:
    """Returns the run described by gin files, or the update of a model alone, and its name.

    Gin files that bind nothing of `trainer.train` describe a model alone. Loss, optimizer, schedule
    and mesh are then the macros LOSS, OPTIMIZER, SCHEDULE and MESH of `_MODEL_ALONE`.
    """
    statements = gin_files.read_all(files)
    bound = [s for s in statements if isinstance(s, gin_files.Binding)]
    is_run = any(f".{b.selector}".endswith(".trainer.train") for b in bound)
    if is_run:
        supplied = _unneeded(bound, bindings)
        roots = ["%MODEL", "@trainer.train"]
        config = gin_config.load(files, [*supplied, *bindings], roots=roots, trusted=trust)
        step = _run(config, moved_runs.folder_of(files))
    else:
        macros = ["MODEL", *(binding.partition("=")[0] for binding in _MODEL_ALONE)]
        roots = [f"%{macro}" for macro in macros]
        config = gin_config.load(files, [*_MODEL_ALONE, *bindings], roots=roots, trusted=trust)
        step = StepConfig(**{macro.lower(): config.macro(macro) for macro in macros})
    has_name = any(b.is_macro and b.selector == "MODEL_NAME" for b in bound)
    return step, config.macro("MODEL_NAME") if has_name else "without a name"


def _run(config: gin_config.Config, run_dir: str | None) -> TrainRun:
    """Returns the run of a configuration; if its data is gone, only with its lengths."""
    settings: dict[str, Any] = config.arguments(trainer.train, leave_out=DATA_ARGUMENTS)
    with vocabulary_files.of_run(run_dir):
        try:
            settings |= config.arguments(trainer.train, only=DATA_ARGUMENTS)
        except errors.UserError as error:
            kept = vocabulary_files.load(run_dir) if run_dir else None
            if kept is None:
                raise
            print(f"the run's data is left out: {error}", file=sys.stderr)
            settings["train_data"] = kept
    return TrainRun(**settings)


def _data(step: StepConfig) -> Any:
    """Returns the training data of a run; None for a model alone."""
    return getattr(step, "train_data", None)


def make_subject(name: str, step: StepConfig, flags: Mapping[str, Any]) -> Subject:
    """Returns what to report on; flags that are not None override the settings.

    Raises:
        UserError: the model is not a text model, or rows exceed its learned positions.
    """
    model, data = step.model, _data(step)
    if not isinstance(model, ConvT5Config):
        raise errors.UserError(
            f"model={type(model).__name__} is not a ConvT5Config; inspect describes text "
            "models, so bind MODEL = @architecture.ConvT5Config()."
        )
    chosen = {
        setting: _first_known(flags.get(setting), getattr(data, setting, None), default)
        for setting, default in DEFAULTS.items()
    }
    _check_lengths(
        model, {"encoder": chosen["encoder_length"], "decoder": chosen["decoder_length"]}
    )
    return cost_report.Subject(
        name=name,
        step=step,
        **chosen,
        packed=getattr(data, "pack", False),
        devices=_first_known(flags.get("devices"), jax.device_count()),
        assumed=() if data else _assumed(flags, step),
    )


def _measure(subject: Subject, flags: Any, trained: Any) -> tuple[str, list[dict[str, Any]]]:
    """Returns the measured receptive fields as text and as plain values; plots them if asked."""
    plot = flags.plot
    if trained is None:
        model, name = jax.jit(subject.config.build)(jax.random.key(0)), "at initialisation"
    else:
        model, name = trained, f"of {flags.checkpoint}"
    lengths: dict[StackName, int] = {
        "encoder": subject.encoder_length,
        "decoder": subject.decoder_length,
    }
    vocab_size = model.config.vocab_size
    lowest = min(3, vocab_size - 1)  # Lower ids are mostly padding, end and unknown.
    halves = {
        half: receptive_field.measure(
            model,
            jax.random.randint(jax.random.key(1), (2, length), lowest, vocab_size),
            stack=half,
        )
        for half, length in lengths.items()
    }
    if plot:
        receptive_field.draw(halves, plot)
    all_fields = [field for fields in halves.values() for field in fields]
    title = f"Receptive field measured by gradients, {name}, on random tokens"
    text = f"{title}\n{receptive_field.table(all_fields)}"
    return (f"{text}\n  drawn to {plot}" if plot else text), [f.as_json() for f in all_fields]


def _pair(
    subject: Subject, other: str, multiple: int | None, trust: Sequence[str]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Returns widths that give the model the cost of another, as text and as plain values."""
    step, name = read_step([other], [], trust=trust)
    reference: Any = step.model
    multiple = multiple or (128 if subject.config.emb_dim >= 256 else 8)
    lengths = {
        "encoder_length": subject.encoder_length,
        "decoder_length": subject.decoder_length,
    }
    quantities: dict[pairing.Quantity, str] = {
        "parameters": "parameters",
        "flops": "forward FLOPs of an example",
    }
    lines, values = [f"Widths of {subject.name} at the cost of {name}"], {}
    for by, what in quantities.items():
        paired = pairing.pair(subject.config, reference, by=by, multiple=multiple, **lengths)
        widths = {"emb_dim": paired.config.emb_dim, "mlp_dim": paired.config.mlp_dim}
        values[by] = {**widths, "cost": paired.cost, "wanted": paired.wanted}
        lines.append(
            f"  {what}: emb_dim={widths['emb_dim']}, mlp_dim={widths['mlp_dim']}: "
            f"{paired.cost:,.0f} for {paired.wanted:,.0f} ({paired.difference:+.2%})"
        )
    return "\n".join(lines), values


def decode_examples(data: Any, num: int) -> list[dict[str, Any]]:
    """Returns the first examples of the data: ids, and text with sentinels as <1>, <2>, ...

    Raises:
        UserError: the gin files describe no training data, or its vocabulary is unknown.
    """
    if data is None:
        raise errors.UserError(
            f"examples={num} needs training data, but the gin files describe a model alone; give a "
            "run, such as --gin_file=gin/runs/quickstart.gin."
        )
    batches = data.build(process_index=0, process_count=1)
    if batches.vocabulary is None:
        raise errors.UserError(
            f"examples={num} needs a vocabulary to decode ids, but the data has none; leave out "
            "--examples."
        )
    examples: list[dict[str, Any]] = []
    while len(examples) < num:
        batch = next(batches, None)
        if batch is None:
            break
        for example in samples.span_examples(batch):
            examples.append(
                {
                    "source": samples.render(example.source, batches.vocabulary),
                    "target": samples.render(example.target, batches.vocabulary),
                    "source_ids": example.source.tolist(),
                    "target_ids": example.target.tolist(),
                }
            )
    return examples[:num]


def _describe_data(data: Any, *, is_read: bool) -> str | None:
    """Returns the data report, or why there is none; None for data without a report."""
    describe = getattr(data, "describe", None)
    if describe is None:
        return None
    try:
        if not is_read and not getattr(data, "is_at_hand", lambda: True)():
            return (
                "data: not measured, because its text was not read before, which takes a while; "
                "train, cache and inspect --examples=N read it"
            )
        return describe()
    except Exception as error:  # The model and its costs can still be reported.
        named = "" if isinstance(error, errors.UserError) else f"{type(error).__name__}: "
        return f"data: not measured: {named}{error}"


def _examples_section(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    if not examples:
        return []
    parts = [
        f"  example {i} ({len(example['source_ids'])} source, {len(example['target_ids'])} target "
        f"tokens)\n    source: {example['source']}\n    target: {example['target']}"
        for i, example in enumerate(examples, start=1)
    ]
    return ["\n".join(["Training examples (<1>, <2>, ... are sentinels)", *parts])]


def _unneeded(bound: Sequence[gin_files.Binding], bindings: Sequence[str]) -> list[str]:
    """Returns settings that are required but irrelevant here, such as the run directory."""
    is_given = any(binding.partition("=")[0].strip() == "RUN_DIR" for binding in bindings)
    needed = gin_files.is_required(bound, "RUN_DIR") and not is_given
    return ["RUN_DIR=unused"] if needed else []


def _assumed(flags: Mapping[str, Any], step: StepConfig) -> tuple[str, ...]:
    assumed = (f"{name} {value}" for name, value in DEFAULTS.items() if flags.get(name) is None)
    return (*assumed, type(step.optimizer).__name__.removesuffix("Config"))


def _first_known(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _check_lengths(model: ConvT5Config, lengths: Mapping[StackName, int]) -> None:
    errors.raise_all(
        [
            f"{stack}_length={length} is longer than max_positions={model.max_positions}, the rows "
            f"of the learned position table{_at_stride(limit // model.max_positions)}; give "
            f"--{stack}_length up to {limit}, or raise max_positions."
            for stack, length in lengths.items()
            if model.max_positions and (limit := model.most_tokens(stack)) and length > limit
        ],
        where="lengths",
    )


def _at_stride(stride: int) -> str:
    return f" (one for {stride} tokens, the stem's stride)" if stride > 1 else ""
