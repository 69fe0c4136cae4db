"""The trainer: take a batch, step, publish, checkpoint.

`loop` is the process; `step` one iteration; `packing`, `advantage`, `loss` and `lineage` are pure; `policy` is the
model; `checkpoint` and `export` write it down.
"""
