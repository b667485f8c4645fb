"""The loops: each is one page of verbs over a `Session`.

`rl` samples, scores, updates and reshards; `sft` updates on conversations, `preference` on pairs or judged answers.
`run` makes the session of a recipe (run folder, ranks, tracker), runs its loop and exports the trained model to `hf/`.
"""
