"""Datasets, partitions, and the clients' data that they determine.

It may import core.
"""
