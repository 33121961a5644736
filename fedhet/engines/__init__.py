"""Where clients run (conf/engine). dispatch.py takes a run to its engine, a module's `run`.

in_process.py serves clients in this process or in worker processes, ray.py in Ray's, flwr.py as
Flower nodes behind `flwr run`. Every engine gives `fedhet.core.server.loop` a courier,
which takes each message to a client's `handle` and brings back the reply:

    LocalCourier (couriers.py): one client after another, in this process
    FusedCourier (fedhet/engines/fused/clients.py): several clients trained as one, in this process
    PoolCourier (pool.py): clients in worker processes
    RayCourier (ray.py): clients in Ray's processes, which may be on other machines
    FlowerCourier (fedhet/flower/courier.py): Flower's nodes, for engine=flwr and deployments

It may import core, data and runs.
"""
