"""The HTTP server: OpenAI's routes over an engine in another process. Never imports torch."""
