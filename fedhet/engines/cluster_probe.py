"""Asks a Ray cluster what it offers; engines/ray.py runs this file in a process of its own.

A cluster that does not answer keeps `ray.init` waiting for minutes, and deaf to signals. A process
can be ended meanwhile. The answer is one line of JSON on stdout.
"""

import json
import logging
import os
import socket
import sys
from typing import Any

CONNECT_SECONDS = 3.0
# Ray reads them when it is imported: how often and how long it tries to reach what does not answer.
PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "3", "RAY_gcs_server_request_timeout_seconds": "3"}


def probe(address: str) -> dict[str, Any]:
    """Connect to the cluster at `<host>:<port>` or "auto", and disconnect.

    Returns:
        `nodes`, the resources of each node; or `reason`, why this process cannot use the cluster.
    """
    os.environ.update(PATIENCE)
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        found: str = canonicalize_bootstrap_address_or_die(address)
    except (OSError, ValueError) as error:
        return {"reason": str(error)}
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        # Ray has replaced localhost by the address under which other machines see this one.
        return {"reason": f"{found}: {error.strerror or error}"}
    try:
        ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False)
        return {"nodes": [node["Resources"] for node in ray.nodes() if node["Alive"]]}
    except Exception as error:  # noqa: BLE001 -- whatever Ray objects to is the answer
        return {"reason": str(error.__cause__ or error)}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])), flush=True)
    os._exit(0)  # the threads of a connection that failed would wait on
