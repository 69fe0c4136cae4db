"""The trainer: take a batch, step, publish, checkpoint.

`loop` is the process, over a backend: `torch_backend`, or `emulated` without a model. `step` is one iteration;
`packing`, `advantage`, `loss` and `lineage` are pure; `policy` is the model; `checkpoint` and `export` write it down.
"""
