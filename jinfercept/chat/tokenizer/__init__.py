"""Text to token ids and back, whatever file the vocabulary came from. Knows no requests and no model weights."""
