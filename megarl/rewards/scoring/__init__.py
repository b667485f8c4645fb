"""Calls of reward functions and scoring servers, and the weighted sum of their scores.

Reading order: `calling` (arguments of a function), `foreign_functions` (of verl and TRL), `results` (checks, sum,
metrics), `reward_main` (the process running functions), `reward_process` (its settings and answers, on the driver),
`reward_pool`. Servers: `http_rewards`, `judge`, `remote_model`.
"""
