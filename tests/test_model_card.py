"""Model cards: what a run directory records stays a name or a number, whatever it holds."""

import json

from convt5.interchange import model_card
from convt5.text import task_format


def test_names_of_a_run_add_no_line_and_no_cell_to_the_card(tmp_path):
    name = "a|b`c``d\n# Title\x1b[2J"
    (tmp_path / "config.gin").write_text(f"train/data.DataConfig.mixture = {name!r}\n")
    summary = {"metric": name, "metric_value": 0.5, "train_loss": True, "validation_loss": "1.0"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (data,) = model_card._data(tmp_path)
    assert data == r"Trained on ``` a|b`c``d\n# Title\x1b[2J ```."
    (metrics,) = model_card._metrics(tmp_path)
    header, rule, row = metrics.splitlines()
    assert row == r"| a\|b`c``d\n# Title\x1b[2J | 0.5000 |"
    assert len(header) == len(rule) == len(row)


def test_what_is_not_recorded_is_said_to_be_so(tmp_path):
    assert model_card._data(tmp_path) == ["Not recorded."]
    assert model_card._metrics(tmp_path) == ["Not recorded."]


def test_a_run_on_cached_rows_has_the_tasks_that_these_were_made_of(tmp_path):
    (tmp_path / "config.gin").write_text(
        "import convt5.data.cached_data\ncached_data.CachedDataConfig.path = 'cache'\n"
    )
    task_format.write(tmp_path, [task_format.plain("english"), task_format.plain("french")])
    assert model_card._data(tmp_path) == ["Trained on `english`, `french`."]
