"""Evaluates runs on tasks of seqio where neither TensorFlow nor the data is.

Four commands, of which only `ask` and `measure` need TensorFlow and the data:

`ask --gin_file=gin/finetune/trec6.gin --gin.DATA=... --split=test --file=trec6.json` writes the
token ids of the inputs and of the targets whose scores the metrics need.

`answer --file=trec6.json --output=answers.jsonl RUN ...` computes scores and predictions of the
runs, on whatever device JAX has.

`measure`, with the settings of `ask` and `--answers answers.jsonl`, prints the metrics of each run
as JSON lines. They are those of `convt5.eval`: the evaluator is the same, and only the model is
elsewhere.

`copied --file=trec6.json --answers answers.jsonl` prints how many generated answers stand word for
word in their input.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import convt5
from convt5 import errors
from convt5.configuration import command_line, gin_config
from convt5.evaluation.predictor import Prediction, Predictor, TargetScore
from convt5.evaluation.settings import PredictConfig
from convt5.modeling.model import ConvT5

_BATCH_SIZE = 256


class Ids(NamedTuple):
    """A vocabulary of which only the number of ids and the end token are known.

    Attributes:
        vocab_size: number of ids.
        eos_id: the end token.
    """

    vocab_size: int
    eos_id: int
    extra_ids: int = 0

    def encode(self, s: str, /) -> list[int]:
        """Returns no ids, as nothing is asked in text."""
        del s
        return []

    def decode(self, ids: Sequence[int], /) -> str:
        """Returns no text, as `measure` decodes."""
        del ids
        return ""


class Asking:
    """Stands for a predictor, and notes what it is asked."""

    spans_hosts = False

    def __init__(self):
        self.questions: dict[str, Any] = {"predicts": False}

    def score_choices(self, sources: Any, choices: Any, *, at_least: Any, **_: Any) -> Any:
        self.questions |= {"sources": sources, "choices": choices, "at_least": at_least}
        return [[TargetScore(0.0, len(ids), 0.0) for ids in each] for each in choices]

    def predict_tokens(self, sources: Any, **_: Any) -> list[Prediction]:
        self.questions["predicts"] = True
        return [Prediction(("",), (0.0,), ((),)) for _ in sources]


class Answering:
    """Stands for a predictor, and repeats what it answered elsewhere."""

    spans_hosts = False

    def __init__(self, answers: Mapping[str, Any]):
        self._answers = answers

    def score_choices(self, sources: Any, choices: Any, **_: Any) -> Any:
        del sources, choices
        return [[TargetScore(*each) for each in group] for group in self._answers["scores"]]

    def predict_tokens(self, sources: Any, **_: Any) -> list[Prediction]:
        del sources
        return [Prediction(("",), (0.0,), (tuple(ids),)) for ids in self._answers["tokens"]]


def evaluator(settings: argparse.Namespace, bindings: Sequence[str]) -> Any:
    """Returns the evaluator of the task evaluation that the gin files describe."""
    from convt5.evaluation import task_data
    from convt5.evaluation.evaluator import Evaluator
    from convt5.evaluation.settings import EvalConfig

    bindings = [each.removeprefix("--gin.") for each in bindings]
    described = gin_config.load(
        settings.gin_file, ["EVALUATED=@evaluation.TaskEval()", *bindings], roots=["%EVALUATED"]
    ).macro("EVALUATED")
    task = task_data.find_task(described.task)
    task_data.check_split(task, settings.split)
    lengths = PredictConfig(
        max_input_length=described.max_input_length, max_length=described.max_length
    )
    chosen = EvalConfig(
        split=settings.split, num_examples=settings.num_examples, every_nth=settings.every_nth
    )
    return Evaluator(task, settings.split, lengths, chosen)


def ask(settings: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Writes the questions of one split of a task."""
    of_task, asking = evaluator(settings, bindings), Asking()
    of_task.evaluate(asking)
    vocabulary = of_task.task.output_features["targets"].vocabulary
    about = {
        "lengths": of_task.predict_config.task_lengths(),
        "vocabulary": [vocabulary.vocab_size, vocabulary.eos_id],
    }
    settings.file.write_text(json.dumps({**about, **asking.questions}))
    print(of_task.describe())


def answer(settings: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Appends the answers of each run to a file of JSON lines."""
    del bindings
    for run in settings.runs:
        model = convt5.load_model(run)
        assert isinstance(model, ConvT5)
        line = {"run": pathlib.Path(run).name, **answers(model, settings.file)}
        with settings.output.open("a") as file:
            file.write(json.dumps(line) + "\n")


def answers(
    model: ConvT5, file: pathlib.Path, *, make: type[Predictor] = Predictor
) -> dict[str, Any]:
    """Returns what a model answers to the questions of a file, as `measure` reads it."""
    asked = json.loads(file.read_text())
    config = PredictConfig(
        max_input_length=asked["lengths"]["inputs"],
        max_length=asked["lengths"]["targets"],
        batch_size=_BATCH_SIZE,
    )
    predictor = make(model, Ids(*asked["vocabulary"]), config)
    given: dict[str, Any] = {"file": file.name, "device": jax.devices()[0].device_kind}
    scores = predictor.score_choices(
        asked["sources"], asked["choices"], at_least=tuple(asked["at_least"])
    )
    given["scores"] = [
        [(round(s.log_prob, 6), s.num_tokens, round(s.objective, 6)) for s in each]
        for each in scores
    ]
    if asked["predicts"]:
        predicted = predictor.predict_tokens(asked["sources"])
        given["tokens"] = [each.tokens[0] if each.tokens else () for each in predicted]
    return given


def measure(settings: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Prints the metrics of each run that answered these questions."""
    of_task = evaluator(settings, bindings)
    for answers in _answered(settings):
        metrics = of_task.evaluate(Answering(answers)).metrics
        print(json.dumps({"run": answers["run"], "split": settings.split, **metrics}))


def copied(settings: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Prints the share of generated answers that stand in their input, and in another's."""
    del bindings
    asked = json.loads(settings.file.read_text())
    sources, end_id = asked["sources"], asked["vocabulary"][1]
    for answers in _answered(settings):
        tokens = [[i for i in ids if i != end_id] for ids in answers["tokens"]]
        shares = {
            name: 100 * sum(map(_holds, [*sources[shift:], *sources[:shift]], tokens)) / len(tokens)
            for name, shift in {"its_input": 0, "another_input": 97 % len(sources)}.items()
        }
        print(json.dumps({"run": answers["run"], "answers": len(tokens), **shares}))


def _holds(source: Sequence[int], part: Sequence[int]) -> bool:
    starts = range(len(source) - len(part) + 1)
    return bool(part) and any(source[i : i + len(part)] == part for i in starts)


def _answered(settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the answers of each run to these questions."""
    for line in (line for file in settings.answers for line in file.read_text().splitlines()):
        answers = json.loads(line)
        if answers.get("file") == settings.file.name:
            yield answers


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python docs/tools/remote_evaluation.py", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    of_task = (ask, measure)
    for function in (ask, answer, measure, copied):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(function=function)
        add = command.add_argument
        add("--file", type=command_line.path, required=True, help="the questions")
        if function is answer:
            add("--output", type=command_line.path, required=True, help="JSON lines, appended to")
            add("runs", nargs="+", help="run directories")
        if function in (measure, copied):
            of_answers = {"type": command_line.path, "nargs": "+", "required": True}
            add("--answers", help="files that `answer` wrote", **of_answers)
        if function in of_task:
            add("--gin_file", action="append", required=True, help="of gin/finetune; bind TaskEval")
            add("--split", default="test")
            add("--num_examples", type=int, help="default: all")
            add("--every_nth", type=int, default=1)
    settings, bindings = parser.parse_known_args(argv)
    unknown = [each for each in bindings if not each.startswith("--gin.")]
    if unknown or (bindings and settings.function not in of_task):
        raise errors.UserError(f"{bindings[0]} is no flag of this command; --help lists them.")
    settings.function(settings, bindings)


if __name__ == "__main__":
    command_line.run(main)
