"""The loops: each is one page of verbs over a `Session`.

`rl` samples, scores, updates and reshards; `sft` updates on conversations. `run` makes the session of a recipe
(run folder, ranks, tracker), carries its loop out and leaves the trained model in `hf/`.
"""
