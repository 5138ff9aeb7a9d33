"""Where roles run: in this process, in sibling processes or in Ray actors; and how a batch is split among them.

batch_partition     A batch partitioned among processes, balanced by tokens
launcher            Worker processes on this machine: started, connected to the driver
local_worker_group  Roles in the driver's own process
placement           Where roles live: the configuration of it, role groups behind one interface
ray/                Roles in Ray actors. Only this package imports Ray
rpc                 Remote calls to roles: handles whose methods return futures, the rows that each process gets
serialization       Serialization of values for other processes: a small pickle
shm_channel         Message channel between the driver and a worker: pickles through a socket
worker              The main program of a worker process: `python -m verl.cluster.worker`
"""
