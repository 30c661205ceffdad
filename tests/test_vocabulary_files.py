"""A model keeps its vocabulary: it is used without its data, and never with another vocabulary."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import seqio
import tiny_run
import word_pieces
from convt5.tasks import vocabularies

import convt5
from convt5 import convert, errors, infer, train
from convt5 import eval as convt5_eval
from convt5.evaluation import run_settings
from convt5.interchange import initialization
from convt5.text import vocabulary_files
from convt5.training.run_directory import CONFIG_FILE

OTHER_TEXT = "red green blue cyan magenta yellow key paper ink brush line stroke colour palette"
TASK = """
from convt5.tasks import classification
from convt5.tasks import vocabularies
classification.text_classification.path = '{rows}'
classification.text_classification.labels = ['yes', 'no']
classification.text_classification.vocabulary = @vocabularies.sentencepiece()
vocabularies.sentencepiece.path = '{model}'
"""


@pytest.fixture
def words(tmp_path):
    """A SentencePiece file, and one of the same size with other pieces."""
    (tmp_path / "words.model").write_bytes(word_pieces.trained_model())
    (tmp_path / "other.model").write_bytes(word_pieces.trained_model(OTHER_TEXT))
    return str(tmp_path / "words.model")


def round_trip(folder, *pair, **settings):
    inputs, targets = (vocabulary_files.of(vocabulary) for vocabulary in pair)
    text = vocabulary_files.KeptText(inputs, targets, **settings)
    vocabulary_files.write(folder / vocabulary_files.FOLDER, text)
    assert vocabulary_files.load(folder) == text
    return vocabulary_files.load_features(folder)


class TestFiles:
    def test_a_vocabulary_comes_back_as_it_was(self, tmp_path, words):
        for vocabulary in (vocabularies.sentencepiece(words, 7), vocabularies.characters(3)):
            found = round_trip(tmp_path, vocabulary, vocabulary, add_eos=False, encoder_length=9)
            assert found.inputs is found.targets
            assert not found.add_eos
            assert found.inputs.encode("the cat") == vocabulary.encode("the cat")
            assert found.inputs.vocab_size == vocabulary.vocab_size
            assert found.inputs.extra_ids == vocabulary.extra_ids

    def test_inputs_and_targets_may_have_different_ones(self, tmp_path, words):
        found = round_trip(tmp_path, vocabularies.characters(), vocabularies.sentencepiece(words))
        assert found.inputs == vocabularies.characters()
        assert found.targets.encode("the cat") == vocabularies.sentencepiece(words).encode(
            "the cat"
        )

    def test_sentinels_of_the_model_itself_stay_its_last_ids(self, tmp_path, words):
        own = tmp_path / "own.model"
        own.write_bytes(seqio.SentencePieceVocabulary(words, extra_ids=5).sp_model)
        vocabulary = vocabularies.sentencepiece(str(own), 5)
        found = round_trip(tmp_path, vocabulary, vocabulary)
        assert (found.inputs.vocab_size, found.inputs.extra_ids) == (30, 5)

    @pytest.mark.parametrize(
        "vocabulary",
        [
            lambda words: seqio.PassThroughVocabulary(30),
            lambda words: seqio.SentencePieceVocabulary(words, 5, reverse_extra_ids=False),
        ],
    )
    def test_what_a_file_cannot_say_is_not_kept(self, words, vocabulary):
        assert vocabulary_files.of(vocabulary(words)) is None

    def test_vocabularies_agree_where_ids_stand_for_the_same_pieces(self, tmp_path, words):
        own = tmp_path / "own.model"
        own.write_bytes(seqio.SentencePieceVocabulary(words, extra_ids=5).sp_model)
        few, many, brings, other, letters = (
            vocabulary_files.of(v)
            for v in (
                vocabularies.sentencepiece(words, 5),
                vocabularies.sentencepiece(words, 100),
                vocabularies.sentencepiece(str(own), 5),
                vocabularies.sentencepiece(str(tmp_path / "other.model"), 5),
                vocabularies.characters(5),
            )
        )
        assert few.agrees_with(many)
        assert few.agrees_with(brings)
        assert brings.agrees_with(few)
        assert not few.agrees_with(other)
        assert not few.agrees_with(letters)
        assert not few.agrees_with(few._replace(model=few.model[:-9]))
        assert len({v.fingerprint for v in (few, many, brings, other, letters)}) == 5

    @pytest.mark.parametrize(
        "damage",
        [
            lambda folder: (folder / "about.json").write_text("{"),
            lambda folder: (folder / "about.json").write_text('{"inputs": {"words": 3}}'),
            lambda folder: (folder / "about.json").write_text('{"inputs": {"characters": -1}}'),
            lambda folder: (folder / "inputs.model").unlink(),
            lambda folder: (folder / "inputs.model").write_bytes(b"{}"),
            lambda folder: (folder / "inputs.model").write_bytes(
                word_pieces.trained_model(eos_id=-1)
            ),
        ],
    )
    def test_damaged_files_end_in_one_message(self, tmp_path, words, damage):
        vocabulary = vocabularies.sentencepiece(words)
        round_trip(tmp_path, vocabulary, vocabulary)
        damage(tmp_path / vocabulary_files.FOLDER)
        with pytest.raises(
            errors.UserError, match="vocabulary, the vocabularies of the model, can"
        ):
            vocabulary_files.load(tmp_path)

    def test_a_file_inside_of_a_run_is_that_file(self, tmp_path, words):
        run = tmp_path / "run"
        round_trip(run, vocabularies.characters(), vocabularies.sentencepiece(words, 7))
        with pytest.raises(errors.UserError, match="name the file of one of them"):
            vocabularies.named(str(run))
        for file in (run / "vocabulary" / "targets.model", run / "other.model"):
            shutil.copy(words, file)
            assert vocabularies.named(str(file), 5).vocab_size == 25 + 5
        with pytest.raises(errors.UserError, match=r"absent\.model' is not there"):
            vocabularies.named(str(run / "absent.model"))

    def test_a_folder_of_hugging_face_inside_of_a_run_has_its_own(self, tmp_path, words):
        round_trip(tmp_path, vocabularies.characters(), vocabularies.characters())
        (tmp_path / "t5").mkdir()
        shutil.copy(words, tmp_path / "t5" / "spiece.model")
        assert vocabulary_files.load(tmp_path / "t5").inputs.kind == "sentencepiece"
        assert vocabulary_files.load_features(tmp_path / "t5").inputs.vocab_size == 125

    def test_folders_of_hugging_face_bring_their_vocabulary(self, tmp_path, words):
        folder = tmp_path / "t5"
        folder.mkdir()
        assert vocabulary_files.load(folder) is None
        shutil.copy(words, folder / "spiece.model")
        found = convt5.load_vocabulary(folder)
        assert found.vocab_size == 25 + 100
        assert found.encode("the cat") == vocabularies.sentencepiece(words).encode("the cat")

    @pytest.mark.parametrize("count", [0, 7, 100])
    def test_a_folder_of_hugging_face_has_as_many_sentinels_as_its_export(
        self, tmp_path, words, count
    ):
        content = pathlib.Path(words).read_bytes()
        kept = vocabulary_files.KeptVocabulary("sentencepiece", count, content)
        text = vocabulary_files.KeptText(kept, kept)
        vocabulary_files.write_for_hugging_face(tmp_path, text)
        assert vocabulary_files.load(tmp_path) == text

    def test_tokens_that_a_folder_adds_are_told(self, tmp_path, words):
        shutil.copy(words, tmp_path / "spiece.model")
        assert vocabulary_files.added_tokens(tmp_path) == []
        names = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<hl>"]
        by_id = {str(i): {"content": name} for i, name in enumerate(names)}
        about = {"added_tokens_decoder": by_id | {"9": {"content": 3}, "10": None}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<sep>": 126, "<hl>": 125}))
        assert vocabulary_files.added_tokens(tmp_path) == ["<hl>", "<sep>"]

    def test_settings_name_a_file_a_model_or_bytes(self, tmp_path, words):
        vocabulary = vocabularies.sentencepiece(words, 7)
        round_trip(tmp_path / "run", vocabulary, vocabulary)
        round_trip(tmp_path / "two", vocabulary, vocabularies.characters())
        assert vocabularies.named("bytes") == vocabularies.characters()
        assert vocabularies.named(words) == vocabularies.sentencepiece(words)
        assert vocabularies.named(str(tmp_path / "run")).vocab_size == 25 + 7
        for source, message in (
            (str(tmp_path), "keeps no vocabulary"),
            (str(tmp_path / "two"), "has one vocabulary of inputs and another"),
            (str(tmp_path / "no.model"), "no.model' is not there"),
        ):
            with pytest.raises(errors.UserError, match=message):
                vocabularies.named(source)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a run of two steps, and in `data` everything that it read."""
    folder = tmp_path_factory.mktemp("original")
    data = folder / "data"
    data.mkdir()
    lines = [json.dumps(row) + "\n" for row in tiny_run.REVIEWS[:4] * 3]
    for name in ("train", "dev"):
        (data / f"{name}.jsonl").write_text("".join(lines))
    (data / "words.model").write_bytes(word_pieces.trained_model())
    train.main([f"--gin_file={gin_file(folder, 'run', rows=data, model=data / 'words.model')}"])
    return folder


@pytest.fixture
def data(original, tmp_path):
    """The folder of the data, which a test may change or remove: afterwards it is as before."""
    kept = shutil.copytree(original / "data", tmp_path / "kept data")
    yield original / "data"
    shutil.rmtree(original / "data", ignore_errors=True)
    shutil.copytree(kept, original / "data")


def gin_file(folder, name, *, rows, model, extra=""):
    settings = tiny_run.GIN.format(
        vocab=tiny_run.VOCAB,
        run_dir=str(folder / name),
        task="classification.text_classification()",
        encoder_length=20,
        decoder_length=8,
    )
    settings = settings.replace(
        "'classification.text_classification()'", "@classification.text_classification()"
    )
    settings = settings.replace("num_steps = 20", "num_steps = 2").replace("size = 4", "size = 8")
    settings = settings.replace("split = 'validation'", "split = 'train'")
    path = folder / f"{name}.gin"
    path.write_text(settings + TASK.format(rows=rows, model=model) + extra)
    return str(path)


MEASURED_TASK = """
from convt5 import evaluation
trainer.train.task_evals = [@evaluation.TaskEval()]
evaluation.TaskEval.task = @of_task/classification.text_classification()
of_task/classification.text_classification.vocabulary = None
evaluation.TaskEval.split = 'train'
trainer.train.eval_data = @data.DataConfig()
trainer.train.eval_num_batches = 1
evaluation.TaskEval.max_input_length = 20
evaluation.TaskEval.max_length = 8
"""
EVAL_DATA = """
trainer.train.eval_data = @of_spans/data.DataConfig()
of_spans/data.DataConfig.mixture = 'pydoc_span_corruption'
trainer.train.eval_num_batches = 1
"""


@pytest.mark.parametrize(
    ("name", "extra"), [("task_evals 'task'", MEASURED_TASK), ("eval_data", EVAL_DATA)]
)
def test_a_model_is_not_measured_with_another_vocabulary_than_it_is_trained_with(
    tmp_path, words, name, extra
):
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"text": "the cat", "label": "yes"}\n' * 2)
    file = gin_file(tmp_path, "other", rows=rows, model=words, extra=extra)
    found = rf"{name}: its inputs have the vocabulary characters .* train_data have sentencepiece"
    for flags in (["--dry_run"], []):
        with pytest.raises(errors.UserError, match=found):
            train.main([f"--gin_file={file}", *flags])


@pytest.fixture
def trained(original, tmp_path):
    """A copy of the run."""
    return shutil.copytree(original / "run", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
class TestRuns:
    def test_a_run_is_used_where_its_data_and_vocabulary_are_gone(
        self, trained, data, tmp_path, capsys
    ):
        (tmp_path / "in.txt").write_text("the cat sat on the log\n")

        def predict(run, out):
            flags = [f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / out}"]
            assert infer.main([f"--checkpoint={run}", *flags]) == 0
            return json.loads((tmp_path / out).read_text())

        expected = predict(trained, "before.jsonl")
        (ours,) = convt5.load_predictor(trained).predict(["the cat sat on the log"])
        assert [*ours.texts] == expected["predictions"]
        np.testing.assert_allclose(ours.scores, expected["scores"], rtol=1e-5)
        shutil.rmtree(data)
        moved = shutil.move(trained, tmp_path / "moved")
        assert predict(moved, "after.jsonl") == expected
        assert "left out" not in capsys.readouterr().err
        # Lengths are those of training, not what a model without a run gets.
        infer.main([f"--checkpoint={moved}", f"--input={tmp_path / 'in.txt'}", "--dry_run"])
        assert "20 tokens in, 8 out" in capsys.readouterr().out
        config = convt5.load_predictor(moved, max_length=5).config
        assert (config.max_input_length, config.max_length) == (20, 5)
        with pytest.raises(errors.UserError, match=r"max_lenght is no setting.*max_length"):
            convt5.load_predictor(moved, max_lenght=5)
        assert convt5.load_vocabulary(f"{moved}/checkpoints/2").vocab_size == 25 + 100

    def test_the_file_of_a_vocabulary_may_change_after_training(self, trained, data):
        before = run_settings.text_features(str(trained)).inputs.encode("the cat")
        (data / "words.model").write_bytes(word_pieces.trained_model(OTHER_TEXT))
        assert run_settings.text_features(str(trained)).inputs.encode("the cat") == before

    def test_a_run_does_not_go_on_with_another_vocabulary(self, trained, tmp_path, data, words):
        other = gin_file(
            tmp_path,
            "run",
            rows=data,
            model=tmp_path / "other.model",
            extra="trainer.train.num_steps = 4\n",
        )
        with pytest.raises(errors.UserError, match=r"changed since its checkpoint \(vocabularies:"):
            train.main([f"--gin_file={other}"])
        assert "words.model" in (trained / CONFIG_FILE).read_text()

    def test_fine_tuning_refuses_embeddings_of_another_vocabulary(
        self, trained, tmp_path, data, words, capsys
    ):
        start = f"""
from convt5.interchange import initialization
trainer.train.init_from = @initialization.InitFrom()
initialization.InitFrom.path = '{trained}'
"""
        other = tmp_path / "other.model"
        tuned = gin_file(tmp_path, "tuned", rows=data, model=other, extra=start)
        for flags in (["--dry_run"], []):
            with pytest.raises(
                errors.UserError, match="was trained with another vocabulary of inp"
            ):
                train.main([f"--gin_file={tuned}", *flags])
        assert not (tmp_path / "tuned").exists()
        exclude = "initialization.InitFrom.exclude = ['token_embedder/embedding']\n"
        tuned = gin_file(tmp_path, "tuned", rows=data, model=other, extra=start + exclude)
        assert train.main([f"--gin_file={tuned}"]) == 0
        capsys.readouterr()
        transfer = "initialization.InitFrom.vocabulary_transfer = True\n"
        tuned = gin_file(tmp_path, "moved", rows=data, model=other, extra=start + transfer)
        for flags in (["--dry_run"], []):
            assert train.main([f"--gin_file={tuned}", *flags]) == 0
        assert "a new one for 0: token_embedder/embedding" in capsys.readouterr().err

    def test_fine_tuning_refuses_an_output_head_of_another_vocabulary(self, tmp_path, words):
        def kept(model):
            return vocabulary_files.of(vocabularies.sentencepiece(str(model)))

        own, other = kept(words), kept(tmp_path / "other.model")
        vocabulary_files.write(
            tmp_path / "run" / vocabulary_files.FOLDER, vocabulary_files.KeptText(own, own)
        )

        def check(*, targets, **settings):
            model = tiny_run.make_model(tie_output=False)
            text = vocabulary_files.KeptText(other, targets)
            source = initialization.InitFrom(path=str(tmp_path / "run"), **settings)
            source.check_vocabulary(text, model)

        check(targets=own, exclude=["token_embedder"])
        check(targets=other, exclude=["token_embedder", "output_head"])
        for excluded, taken in (("token_embedder", "output_head"), ("output_head", "token_embed")):
            with pytest.raises(errors.UserError, match=rf"vocabulary of .*exclude \['{taken}"):
                check(targets=other, exclude=[excluded])

    def test_what_is_made_of_a_run_has_its_vocabulary(self, trained, tmp_path, data, words):
        export = tmp_path / "export"
        argv = [f"--checkpoint={trained}", f"--output_dir={export}", "--to=safetensors"]
        assert convert.main(argv) == 0
        shutil.rmtree(data)
        expected = vocabularies.sentencepiece(words).encode("the cat")
        assert convt5.load_vocabulary(export).encode("the cat") == expected

    @pytest.mark.slow
    def test_fine_tuning_and_evaluation_take_the_vocabulary_of_the_model(
        self, tmp_path, data, capsys
    ):
        pieces = word_pieces.trained_model(
            f"{word_pieces.TEXT} positive negative", vocab_size=60, model_type="bpe"
        )
        (data / "pieces.model").write_bytes(pieces)
        rows = [{"text": text, "label": "positive"} for text in ("the cat", "the dog")] * 4
        for name in ("train", "dev"):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (data / f"{name}.jsonl").write_text(lines)
        sizes = {"emb_dim": 8, "mlp_dim": 16, "num_heads": 2, "head_dim": 4, "vocab_size": 384}
        common = [
            "--gin_file=gin/finetune/sst2.gin",
            *(f"--gin.architecture.ConvT5Config.{name}={size}" for name, size in sizes.items()),
            "--gin.architecture.StackConfig.num_layers=1",
            "--gin.data.DataConfig.batch_size=8",
            f"--gin.DATA={data}",
            "--gin.NUM_STEPS=1",
        ]
        first, second = tmp_path / "first", tmp_path / "second"
        scratch = ["--gin.trainer.train.init_from=None", f"--gin.VOCABULARY={data}/pieces.model"]
        assert train.main([*common, *scratch, f"--gin.RUN_DIR={first}"]) == 0
        tuning = [f"--gin.INIT_FROM={first}", f"--gin.RUN_DIR={second}"]
        assert train.main([*common, *tuning]) == 0
        kept = vocabulary_files.load(second)
        assert kept == vocabulary_files.load(first)
        assert kept.inputs.model == (data / "pieces.model").read_bytes()
        argv = [f"--checkpoint={second}", "--gin_file=gin/tasks/sst2.gin", f"--gin.DATA={data}"]
        assert convt5_eval.main([*argv, "--dry_run"]) == 0
        assert "sst2, sst2_rank" in capsys.readouterr().out
