"""The HTTP server: OpenAI's protocol on an `LLM`.

Knows no arrays; nothing but `cli` imports it. FastAPI comes with the extra `serve`.
"""
