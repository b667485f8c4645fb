"""Commands on models and on finished or stopped runs: evaluate, export, fork, replay."""
