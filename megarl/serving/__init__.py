"""OpenAI-compatible endpoint through which agents sample from the policy. It records their calls for training.

A session is the record of one agent's attempt. This package does not import torch. Its modules:

- `endpoint`: the HTTP server; `dialects`: the wire formats of OpenAI and Anthropic
- `sessions`, `session`: sample and record the calls of attempts
- `conversation`, `history`: match a client's messages with recorded tokens
- `codec`: converts messages to tokens and back, in its own thread
- `agents`, `containers`: run a recipe's agent program
- `local_model`: loads a model folder into an engine, for evaluations
"""
