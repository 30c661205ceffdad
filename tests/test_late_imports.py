"""Packages that TensorFlow imports needlessly are imported when something reads from them."""

import sys

import commands
import pytest
import tiny_run

from convt5.interchange import portable
from convt5.modeling.tree_paths import named_leaves
from convt5.text import vocabulary_files

PACKAGE = {
    "keras/__init__.py": "print('keras')\nfrom keras import layers\nVERSION = 3\n",
    "keras/layers.py": "print('layers')\nclass Layer: pass\n",
    "keras/src/__init__.py": "print('src')\n",
    "keras/src/optimizers.py": "print('optimizers')\n",
    # What TensorFlow does when it is imported.
    "framework.py": (
        "import importlib, importlib.util\n"
        "place = importlib.util.find_spec('keras.layers').origin\n"
        "importlib.import_module('keras.src.optimizers')\n"
        "import keras as used_later\n"
    ),
}
WINDOW = "with late_imports.postponed():"


def run(folder, code):
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    head = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    head += "from convt5.runtime import late_imports\n"
    return commands.run([sys.executable, "-c", head + code], check=True).stdout.split()


def test_nothing_of_a_postponed_package_is_run(tmp_path):
    out = run(tmp_path, f"{WINDOW} import framework\nprint('keras' in sys.modules)")
    assert out == ["False"]


def test_its_places_are_those_of_the_package(tmp_path):
    out = run(tmp_path, f"{WINDOW} import framework\nprint(framework.place)")
    assert out == [str(tmp_path / "keras" / "layers.py")]


@pytest.mark.parametrize(
    "code",
    [
        "import framework\nprint(framework.used_later.VERSION)",
        "import framework\nimport keras\nprint(keras.VERSION)",
        "import framework, keras\nassert framework.used_later.layers.Layer is keras.layers.Layer\n"
        "print(3)",
    ],
)
def test_it_is_imported_when_something_reads_from_it(tmp_path, code):
    first, rest = code.split("\n", 1)
    assert run(tmp_path, f"{WINDOW} {first}\n{rest}") == ["keras", "layers", "3"]


def test_it_is_imported_when_something_reads_from_it_meanwhile(tmp_path):
    code = (
        f"{WINDOW}\n import framework\n from keras.layers import Layer\n"
        " import keras\n print(Layer is keras.layers.Layer)"
    )
    assert run(tmp_path, code) == ["keras", "layers", "True"]


def test_only_what_was_asked_for_is_postponed(tmp_path):
    assert run(tmp_path, f"{WINDOW}\n import json\nprint('json' in sys.modules)") == ["True"]


@pytest.mark.slow
def test_reading_data_needs_none_of_them():
    code = (
        "import sys\nfrom convt5 import data\ndata.DataConfig\n"
        "names = ['keras', 'sklearn', 'pandas', 'matplotlib', 'scipy.stats', 'pyglove', 'h5py']\n"
        "print([name for name in names if name in sys.modules])\n"
        "import tensorflow as tf\nfrom tensorflow.keras import layers\n"
        "assert layers.Dense is tf.keras.layers.Dense\n"
        "import tensorflow_text\nassert tensorflow_text.keras.layers.ToDense\n"
        "import keras, pyglove\nassert keras.layers.Dense is layers.Dense\n"
        "assert pyglove.floatv(0.0, 1.0)"
    )
    done = commands.run([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_predictions_of_an_exported_model_need_neither_tensorflow_nor_seqio(tmp_path):
    model = tiny_run.make_model()
    portable.write_model(tmp_path, model.config, dict(named_leaves(model)), step=7)
    kept = vocabulary_files.KeptVocabulary("characters", 0)
    vocabulary_files.write(
        tmp_path / vocabulary_files.FOLDER, vocabulary_files.KeptText(kept, kept)
    )
    (tmp_path / "in.txt").write_text("some text\n")
    code = (
        "import sys\nsys.modules.update(tensorflow=None, seqio=None)\n"
        "import convt5\nfrom convt5 import infer\n"
        f"convt5.load_predictor({str(tmp_path)!r})\n"
        f"infer.main(['--checkpoint={tmp_path}', '--input={tmp_path}/in.txt', '--max_length=4'])"
    )
    done = commands.run([sys.executable, "-c", code], check=True)
    assert '"input": "some text"' in done.stdout
