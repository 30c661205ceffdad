"""Hugging Face's T5 (PyTorch) with the sizes of a convt5 model, on CPU."""

from typing import Any

from convt5.benchmarks.sides import Measured, random_batch, random_source
from convt5.modeling.architecture import ConvT5Config


def train_step(config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Returns a training step with its own Adafactor."""
    import torch
    from transformers.optimization import Adafactor

    model = make_model(config).train()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True)
    arrays = random_batch(config, length, batch_size)
    batch = {name: torch.from_numpy(array).long() for name, array in arrays.items()}

    def run() -> float:
        optimizer.zero_grad()
        loss = model(
            input_ids=batch["encoder_input_tokens"],
            decoder_input_ids=batch["decoder_input_tokens"],
            labels=batch["decoder_target_tokens"],
            use_cache=False,
        ).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return run, {}


def decoder(config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Returns a greedy `generate`, with a growing key-value cache."""
    import torch

    model = make_model(config).eval()
    source = torch.from_numpy(random_source(config, length, batch_size)).long()

    def run() -> Any:
        return model.generate(
            source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )

    rows = 2 * config.decoder.num_layers * batch_size * config.num_heads * config.head_dim
    return run, {"state_bytes": 4 * rows * (length + source.shape[1])}


def make_model(config: ConvT5Config) -> Any:
    """Returns Hugging Face's model with these sizes, and initial parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": config.vocab_size,
        "d_model": config.emb_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.encoder.num_layers,
        "num_decoder_layers": config.decoder.num_layers,
        "num_heads": config.num_heads,
        "dropout_rate": config.dropout_rate,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": config.tie_output,
        "decoder_start_token_id": 0,
        # No id ends an output, so every row reaches the maximum length.
        "eos_token_id": None,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
