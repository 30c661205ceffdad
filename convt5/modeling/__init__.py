"""The text model, from a single layer to the whole encoder-decoder."""
