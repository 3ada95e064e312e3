"""The HTTP server on an `LLM`: OpenAI's protocol, and Anthropic's. FastAPI comes with the extra `serve`.

`http` has connections, framing and middleware; `access` keys and limits; `routes` the endpoints; `observe` metrics, traces
and the live page. `Service` is what all routes share. Knows no arrays.
"""
