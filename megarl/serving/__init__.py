"""OpenAI-compatible endpoint for training with any OpenAI client, and its sessions. Imports no torch.

`conversation` normalises a client's messages, `protocol` reads requests and writes answers, `codec` converts messages
to tokens and back in its own thread. `sessions` samples and records, `endpoint` is the HTTP server, `agents` runs a
recipe's program, `local_model` serves a trained model.
"""
