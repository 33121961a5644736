"""Asks the Ray cluster that its argument names what it offers; engines/ray.py runs this file.

A cluster that does not answer keeps `ray.init` waiting for minutes, and deaf to signals. A process
can be ended meanwhile. The answer is one line of JSON on stdout: the resources of each node.
"""

import json
import logging
import os
import sys

import ray

ray.init(sys.argv[1], logging_level=logging.CRITICAL, log_to_driver=False)
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]), flush=True)
os._exit(0)  # Ray's own end takes a second
