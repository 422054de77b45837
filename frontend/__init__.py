"""The HTTP side of mlxhost: one process that speaks OpenAI to clients and tokens to the workers.

Knows HTTP, chat templates, tokenizing, routing; knows nothing of MLX, and of the supervisor only what
comes over the wire. The way of a request: http.body -> openai.requests -> text.prompts -> openai.plan ->
routing + dispatch -> generation -> openai.format -> http.sse.
"""
