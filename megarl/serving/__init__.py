"""The endpoint that any OpenAI client trains through, and its sessions. No torch.

`conversation` brings a client's messages to one form, `protocol` reads requests and writes answers, `codec` turns
messages into tokens and back in a thread of its own, `sessions` samples and records, `endpoint` is the HTTP server,
`agents` runs a recipe's program, `local_model` serves a trained model.
"""
