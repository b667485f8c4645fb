"""OpenAI-compatible endpoint through which agents sample from the policy, and which records their calls for training.

A session is the record of one agent's attempt. `conversation` normalises a client's messages, `protocol` reads requests
and writes answers, `codec` converts messages to tokens and back in a thread of its own. `sessions` samples and records,
`endpoint` is the HTTP server, `agents` runs a recipe's agent program, `local_model` puts a model folder into an
engine for evaluations. This package does not import torch.
"""
