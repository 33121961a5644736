"""The methods. Each method has a file, or a folder, of its own.

The docstring of the file is the reference of the method: equations, messages, and deviations from
the paper. The classes in the file are the client half, the server half, and the plug-in if there is
one.

It may import core and models.
"""
