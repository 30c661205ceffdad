"""A SentencePiece model of a few words, trained in a moment."""

import io

import sentencepiece

TEXT = "the cat sat on the mat and the dog lay on the log while it rained cats and dogs"


def trained_model(text: str = TEXT, **options) -> bytes:
    """Returns a model of 25 pieces as a file has it; `options` of the trainer of SentencePiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 20),
        model_writer=model,
        minloglevel=9,
        **{"vocab_size": 25, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, **options},
    )
    return model.getvalue()
