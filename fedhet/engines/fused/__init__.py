"""Clients, and runs, whose models are trained and evaluated as one.

Each client is written as if it were alone. Where its training or an evaluation begins, it waits for
the others (`scheduler`); what all of them wait for is then done as one (`steps`), with one model in
each row of every tensor (`stacks`).
"""
