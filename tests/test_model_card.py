"""Model cards: what a run directory records stays a name or a number, whatever it holds."""

import json

import pytest
from etils import epath

from convt5.interchange import model_card
from convt5.interchange.mapping import Imported, Report
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.reports import markdown
from convt5.runtime import foreign_files
from convt5.text import task_format


def test_names_of_a_run_add_no_line_and_no_cell_to_the_card(tmp_path):
    name = "a|b`c``d\n# Title\x1b[2J"
    (tmp_path / "config.gin").write_text(f"train/data.DataConfig.mixture = {name!r}\n")
    summary = {
        "step": 7,
        "metric": name,
        "metric_value": 0.5,
        "train_loss": True,
        "validation_loss": "1.0",
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (data,) = model_card._data(tmp_path)
    assert data == r"Trained on ``` a|b`c``d\n# Title\x1b[2J ```."
    (metrics,) = model_card._metrics(tmp_path, step=7)
    header, rule, row = metrics.splitlines()
    assert row == r"| a\|b`c``d\n# Title\x1b[2J | 0.5000 |"
    assert len(header) == len(rule) == len(row)


def card_of(origin, licence=None, **about) -> str:
    sizes = {"vocab_size": 9, "emb_dim": 4, "mlp_dim": 4, "num_heads": 1, "head_dim": 4}
    stack = StackConfig(num_layers=1, mixing="attention")
    config = ConvT5Config(**sizes, encoder=stack, decoder=stack)
    imported = Imported(config, {}, (), Report())
    return model_card.text(imported, origin=str(origin), licence=licence, needs_code=True, **about)


def test_a_card_tells_how_inputs_are_written_and_how_long_answers_are(tmp_path):
    card = card_of(tmp_path, has_tokenizer=True)
    assert "Write inputs" not in card
    assert "max_new_tokens=50" in card
    squad = "question: {question} context: {context}"
    formats = [
        task_format.plain("english"),
        task_format.of_template("sst2", "sst2 sentence: {text}"),
        task_format.of_template("squad", squad, space_punctuation=True),
        task_format.of_template("marked", "{a} {b}", mark_shared=True),
        task_format.unknown("own", ["mine"]),
    ]
    task_format.write(tmp_path, formats)
    card = card_of(tmp_path, has_tokenizer=True, longest=114)
    assert "model.generate(**inputs)[0]))  # Up to 114 tokens, as in training." in card
    assert [line for line in card.splitlines() if line.startswith("- `")] == [
        "- `sst2`: `sst2 sentence: {text}`",
        f"- `squad`: `{squad}`, with spaces around punctuation",
        "- `marked`: `{a} {b}`, with * before words that a field shares with an earlier one",
    ]


@pytest.mark.parametrize("licence", ["mit", "no", "other: #1\ntags: [a]", "\u2019s"])
def test_a_licence_stays_a_text(licence, tmp_path):
    _, head, body = card_of(tmp_path, licence, has_tokenizer=True).split("---\n")
    about = dict(line.split(": ", 1) for line in head.splitlines())
    assert json.loads(about["license"]) == licence
    assert about["tags"] == "[convt5]"
    assert f"\nWeights: {markdown.code(licence)}.\n" in body


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_card_shows_a_tokenizer_where_there_is_one(has_tokenizer, tmp_path):
    card = card_of(tmp_path, has_tokenizer=has_tokenizer)
    assert ("AutoTokenizer" in card) == has_tokenizer
    assert 'AutoModelForSeq2SeqLM.from_pretrained(".", trust_remote_code=True)' in card


def test_what_is_not_recorded_is_said_to_be_so(tmp_path):
    assert model_card._data(tmp_path) == ["Not recorded."]
    assert model_card._metrics(tmp_path, step=0) == ["Not recorded."]


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/7"])
def test_figures_are_those_of_the_exported_step_wherever_it_is_named(tmp_path, inside):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "config.gin").write_text("train/data.DataConfig.mixture = 'english'\n")
    (tmp_path / "summary.json").write_text(json.dumps({"step": 7, "train_loss": 0.25}))
    origin = tmp_path / inside
    assert model_card._data(origin) == ["Trained on `english`."]
    assert "0.2500" in model_card._metrics(origin, step=7)[0]
    assert model_card._metrics(origin, step=5) == ["Not recorded for this step."]


def test_figures_of_a_run_in_a_bucket_are_found(monkeypatch):
    summary = "gs://bucket/run/summary.json"
    of_store = type(epath.Path(summary))
    monkeypatch.setattr(of_store, "exists", lambda path: str(path) == summary)
    found = {summary: {"step": 7, "train_loss": 0.25}}
    monkeypatch.setattr(foreign_files, "find_json", lambda path: found.get(str(path)))
    assert "0.2500" in model_card._metrics("gs://bucket/run/checkpoints/7", step=7)[0]


def test_an_import_was_not_trained_on_the_data_with_which_it_may_go_on(tmp_path):
    (tmp_path / "config.gin").write_text("data.DataConfig.mixture = 'c4'\n")
    (tmp_path / "conversion.txt").write_text("Imported from t5 (hf) by convt5.convert.\n")
    assert model_card._data(tmp_path) == ["Not recorded."]
    task_format.write(tmp_path, [task_format.plain("english")])  # Of the export, or of training.
    assert model_card._data(tmp_path) == ["Trained on `english`."]


def test_a_run_on_cached_rows_has_the_tasks_that_these_were_made_of(tmp_path):
    (tmp_path / "config.gin").write_text(
        "import convt5.data.cached_data\ncached_data.CachedDataConfig.path = 'cache'\n"
    )
    task_format.write(tmp_path, [task_format.plain("english"), task_format.plain("french")])
    assert model_card._data(tmp_path) == ["Trained on `english`, `french`."]
