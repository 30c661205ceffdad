"""Questions made from text: answers stand in the passage, beside the words of the question."""

import random
import re
import time

import pytest
import task_examples
from convt5.tasks import cloze_questions, pretraining, squad, synthetic

from convt5 import data, errors
from convt5.text import task_format

PARAGRAPHS = [
    [
        "The Bank of England was founded in London in 1694, after Mr. William Paterson had asked.",
        "It lent 1,200,000 pounds to the government of King William for his war.",
        'Few people remember that a tally stick (cut from hazel) was then "as good as money."',
        "No.",
        "The other half of the stick was kept at the Exchequer in Westminster.",
    ],
    [
        "The second paragraph is about 1709, when the coldest winter of Europe froze the Thames.",
        "In Paris the poor ate bread of fern roots.",
        "The price of wheat rose six times within a single year.",
    ],
]
SENTENCES = [each for paragraph in PARAGRAPHS for each in paragraph if each != "No."]
DOCUMENT = "\n".join(" ".join(each) for each in PARAGRAPHS)
SETTINGS = {"lengths": (8, 40), "questions": 4, "noise": 0.5}


def asked(seed, **settings):
    return cloze_questions.ask_about(DOCUMENT, random.Random(seed), **{**SETTINGS, **settings})


def words(text):
    return re.findall(r"[\w,]+", text)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(line + "\n" + line for line in [DOCUMENT] * 3))
    return pretraining.text_span_corruption(str(path), validation_fraction=0)


def test_answers_stand_in_passages_of_whole_sentences():
    wholes = [" ".join(SENTENCES[i:j]) for i in range(7) for j in range(i + 1, 8)]
    questions = [question for seed in range(20) for question in asked(seed)]
    assert len(questions) > 100
    for context, question, answer in questions:
        assert answer in context
        assert answer == answer.strip(".,() ")
        assert question.endswith("?")
        assert context in wholes


def about_the_year():
    sentence, settings = "The Thames froze in 1709 for some weeks.", {"noise": 0, "questions": 10}
    questions = (
        cloze_questions.ask_about(sentence, random.Random(seed), **{**SETTINGS, **settings})
        for seed in range(2000)
    )
    return {each.question for found in questions for each in found if each.answer == "1709"}


def test_a_question_is_the_text_around_the_answer_with_a_question_word():
    found = about_the_year()
    for question_word in ("When", "In what year", "What year"):
        assert f"The Thames froze in {question_word.lower()} for some weeks?" in found
        assert f"{question_word} for some weeks The Thames froze in?" in found
        assert f"{question_word} The Thames froze in for some weeks?" in found


def test_words_beside_the_answer_may_be_left_out_and_two_that_tell_stay():
    found = about_the_year()
    assert "The Thames when weeks?" in found
    telling = {"thames", "froze", "weeks"}
    assert all(len(telling & {*words(question.lower())}) >= 2 for question in found)


def test_runs_of_spaces_and_marks_take_no_longer_than_words():
    started = time.process_time()
    for gap in ("-" * 2**16, " " * 2**18):
        text = f"The cat of London sat in 1709 on a{gap}mat in June with others there."
        assert cloze_questions.ask_about(text, random.Random(0), **SETTINGS)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("sentence", "span"),
    [
        ("It was in the Bank of England that he worked.", (4, 7, "name")),
        ("He was born in New York, Europe did not see him.", (4, 6, "place")),
        ("The Thames froze in 1709 for the first time.", (4, 5, "year")),
        ("The king has 12 horses and a very old dog.", (3, 4, "number")),
    ],
)
def test_names_places_years_and_numbers_are_answers(sentence, span):
    assert span in cloze_questions.answers(sentence.split(), random.Random(0))


def test_names_end_at_punctuation():
    sentence = "Today Anna (Mary Smith) met King John."
    found = cloze_questions.answers(sentence.split(), random.Random(0))
    assert [span[:2] for span in found if span.kind == "name"] == [(1, 2), (2, 4), (5, 7)]


def test_noise_leaves_words_out():
    sizes = [sum(len(words(each.question)) for each in asked(1, noise=n)) for n in (0, 0.5, 1)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_contrast_asks_what_only_the_words_of_a_question_decide():
    groups = cloze_questions._GROUPS
    text = "\n".join([*SENTENCES, "The gold of the bank was then moved to Ottawa by ship."])
    questions = [
        question
        for seed in range(200)
        for question in cloze_questions.ask_about(
            text, random.Random(seed), lengths=(20, 60), questions=4, noise=0.5, contrast=True
        )
    ]
    assert {each.answer for each in questions} == {"1,200,000", "1694", "1709", "Ottawa", "Paris"}
    for context, question, answer in questions:
        sentences = [sentence for sentence in text.split("\n") if sentence in context]
        found = [
            [
                (groups[span.kind], cloze_questions._bare(" ".join(words[span.start : span.end])))
                for span in cloze_questions.answers(words, random.Random(0))
                if span.kind != "phrase"
            ]
            for words in map(str.split, sentences)
        ]
        ((place, group),) = [
            (place, group)
            for place, spans in enumerate(found)
            for group, text in spans
            if text == answer
        ]
        alone = [[kind for kind, _ in spans].count(group) == 1 for spans in found]
        assert alone[place]
        assert sum(alone) > 1
        others = {word.lower() for s in sentences if s != sentences[place] for word in words(s)}
        asking = {word for each in cloze_questions._QUESTION_WORDS.values() for word in each}
        kept = {*words(question.lower())} - {*words(" ".join(asking).lower())}
        assert not kept & others
        assert len(kept & {*words(sentences[place].lower())}) >= 2


def test_passages_have_the_lengths_of_the_settings():
    longest_sentence = max(len(each.split()) for each in SENTENCES)
    for low, high in ((8, 8), (20, 40)):
        for context, *_ in asked(0, lengths=(low, high)):
            assert low <= len(context.split()) < high + longest_sentence


def test_examples_have_the_form_of_squad_and_differ_between_epochs(corpus):
    task = cloze_questions.cloze_questions(corpus, min_words=8, max_words=40)
    first, again, other = (task_examples.examples(task, seed=seed) for seed in (0, 0, 1))
    assert len(first) >= 10
    form = squad.squad(None).preprocessors
    assert [type(each) for each in task.preprocessors[-4:]] == [type(each) for each in form[-4:]]
    for example in first:
        inputs, target = example["inputs_pretokenized"].decode(), example["targets_pretokenized"]
        assert re.fullmatch(r"question: .+ \? context: .+", inputs)
        assert target.decode() in inputs
        assert example["answers"].tolist() == [target]
    texts = [[each["inputs_pretokenized"] for each in found] for found in (first, again, other)]
    assert texts[0] == texts[1]
    assert len(set(texts[0]) & set(texts[2])) < len(texts[0]) / 2


def test_they_train_packed_and_know_their_fields(corpus):
    task = cloze_questions.cloze_questions(corpus, min_words=8, max_words=40)
    config = data.DataConfig(
        mixture=task, batch_size=2, encoder_length=1024, decoder_length=128, pack=True
    )
    batch = next(iter(config.build(process_index=0, process_count=1)))
    assert batch["encoder_segment_ids"].max() >= 2
    (format,) = config.task_formats()
    assert format.fields == ("question", "context")


def test_the_words_of_a_question_are_marked_in_its_passage(corpus):
    task = cloze_questions.cloze_questions(corpus, min_words=8, max_words=40, mark_shared=True)
    plain = cloze_questions.cloze_questions(corpus, min_words=8, max_words=40)
    for marked, example in zip(
        *(task_examples.examples(each, seed=0) for each in (task, plain)), strict=True
    ):
        question, context = (
            example["inputs_pretokenized"].decode().removeprefix("question: ").split(" context: ")
        )
        inputs = f"question: {question} context: {task_format.mark_shared(question, context)}"
        assert marked["inputs_pretokenized"].decode() == inputs
        assert "* " in inputs


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"min_words": 0}, "min_words=0 must be at least 1"),
        ({"min_words": 30, "max_words": 20}, "min_words=30 .* at most max_words=20"),
        ({"questions": 0}, "questions=0 must be at least 1"),
        ({"noise": 1.5}, r"noise=1.5 must be in \[0, 1\]"),
    ],
)
def test_settings_out_of_range(corpus, settings, fault):
    with pytest.raises(errors.UserError, match=fault):
        cloze_questions.cloze_questions(corpus, **settings)


def test_the_corpus_is_a_task_of_documents():
    with pytest.raises(errors.UserError, match=r"corpus=.* is no task"):
        cloze_questions.cloze_questions("text.txt")
    task = cloze_questions.cloze_questions(synthetic.gap_copy())
    with pytest.raises(errors.UserError, match="the field 'text'"):
        task_examples.examples(task)
