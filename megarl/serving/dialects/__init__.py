"""Wire formats of the endpoint: OpenAI's chat completions and responses, and Anthropic's messages."""
