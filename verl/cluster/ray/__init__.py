"""Roles in Ray actors. Only this package imports Ray.

ray_init          The connection to Ray: to a cluster by its address
ray_placement     `trainer.placement` for Ray: which cluster, which roles share a worker
ray_worker        The content of a Ray actor: the roles of one process, calls to them, and addresses of its machine
ray_worker_group  Worker groups in Ray actors, on this machine or on a cluster
"""
