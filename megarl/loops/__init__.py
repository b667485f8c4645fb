"""Training loops. Each is one page of calls on a started `Run`.

`rl` samples, scores, updates and reshards. `sft` updates on conversations, `preference` on pairs or judged answers.
`run` sets a run up (folder, ranks, tracker), executes its loop, and exports the trained model to `hf/`.
"""
