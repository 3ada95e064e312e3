"""The HTTP server on an `LLM`: OpenAI's protocol, and Anthropic's. FastAPI comes with the extra `serve`.

`protocols` has bodies and answers; `http` middleware; `access` keys and limits; `routes` the endpoints; `state` what is
stored; `observe` metrics, traces and the live page. `Service` is what all routes share. Knows no arrays.
"""
