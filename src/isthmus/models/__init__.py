"""One text for each model family: from GGUF keys to logits. It knows neither device nor weight format."""
