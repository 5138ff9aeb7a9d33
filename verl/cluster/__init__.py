"""Placement of roles in this process, in sibling processes or in Ray actors, and division of batches among them.

local_worker_group  Roles in the driver's own process, or in sibling processes on this machine
placement           Where roles live: the configuration of it, role groups behind one interface
ray/                Roles in Ray actors. Only this package imports Ray
rpc                 Remote calls to roles: futures, deadlines and blame, over a transport (local processes, Ray)
shm_channel         Message channel between the driver and a worker: pickles through a socket, and serialization
worker              The main program of a worker process: `python -m verl.cluster.worker`
"""
