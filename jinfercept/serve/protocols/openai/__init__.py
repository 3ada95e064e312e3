"""OpenAI's chat completions, text completions and responses, with vLLM's extensions."""
