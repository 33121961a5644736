"""One round of federated learning, without files, Hydra or transport of messages.

It may import no other package.
"""
