"""Trains and evaluates the models of several clients, or runs, in one batch (fused).

The code of a client does not know of other clients. When its training or an evaluation begins, the
client waits for the others (`scheduler`). Then the work of all waiting clients is done in one batch
(`steps`), with tensors that have one row per model (`stacks`).
"""
