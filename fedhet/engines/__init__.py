"""The engines that run clients (conf/engine). dispatch.py calls the `run` of an engine's module.

in_process.py serves clients in this process or in worker processes, ray.py in Ray's processes,
flwr.py as Flower nodes behind `flwr run`. Every engine gives `fedhet.core.server.loop` a transport,
which passes each message to a client's `handle` and returns the reply:

    LocalTransport (local_transport.py): one client after another, in this process
    FusedTransport (fedhet/engines/fused/clients.py): several clients in one batch, in this process
    PoolTransport (pool.py): clients in worker processes
    RayTransport (ray.py): clients in Ray's processes, which may be on other machines
    FlowerTransport (fedhet/flower/transport.py): Flower's nodes, for engine=flwr and deployments

It may import core, data and runs.
"""
