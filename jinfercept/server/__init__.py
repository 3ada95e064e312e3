"""The HTTP server: OpenAI's protocol on an `LLM`. Needs the extra `serve`; nothing outside of it imports FastAPI."""
