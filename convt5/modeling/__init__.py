"""The text model, from single layers to the whole encoder-decoder."""
