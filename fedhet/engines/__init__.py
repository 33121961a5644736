"""Where clients run (conf/engine): each module but the couriers has `run(job)`, an engine.

local.py serves clients in this process or in worker processes, ray.py in Ray's, and flwr.py as
Flower nodes behind `flwr run`. Every engine gives `fedhet.core.server.loop` a courier,
which takes each message to a client's `handle` and brings back the reply:

    LocalCourier (couriers.py): one client after another, in this process
    FusedCourier (fedhet/fused/clients.py): several clients trained as one, in this process
    PoolCourier (pool.py): clients in worker processes
    RayCourier (ray.py): clients in Ray's processes, which may be on other machines
    FlowerCourier (fedhet/flower/server.py): Flower's nodes, for engine=flwr and deployments
"""
