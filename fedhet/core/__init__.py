"""One round of federated learning, without files, Hydra or a way to carry messages.

It may import no other package.
"""
