"""The methods, one to a file.

The docstring of each file is the reference of its method: equations, messages, and deviations from
the paper. Its classes are the client half, the server half, and the plug-in where there is one.

It may import core and models.
"""
