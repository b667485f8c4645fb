"""The optional features of a vLLM engine, each behind the interface `EnginePart`. `choice` chooses them."""
