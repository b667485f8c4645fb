"""Model families: architecture, Megatron parameters and their Hugging Face tensors. Each family has a module in
`pages`.

`family` defines the contents of such a module; `registry` lists the families. `tensors.rules` composes each Megatron
parameter from Hugging Face tensors, for loading, export and reshards. `shape` has a model's sizes.
"""
