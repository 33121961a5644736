"""Trains and evaluates the models of several clients, or runs, in one batch (fused).

A client's code is written for one client only. When its training or an evaluation begins, the
client waits for the others (`scheduler`). Then the work of all waiting clients is done in one batch
(`steps`), with tensors that have one row per model (`stacks`).
"""
