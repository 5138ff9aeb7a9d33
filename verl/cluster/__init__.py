"""Where roles run: in this process, in sibling processes or in Ray actors; and how a batch is split among them.

base           The driver's view of roles: calls that return futures, wherever the roles live
crew           The worker processes of a run: started, connected to the driver, and ended
dividing       A batch divided among processes, balanced by tokens
groups         Whether roles that pass batches to each other live on the same processes
in_process     Roles in the driver's own process: a call is a call
mailbox        Letters between the driver and a worker: small ones through a socket
memory         Memory that is used again and again
mesh           Roles on different devices of this machine, a process for each device of a role
parcel         Values on their way to another process: a small pickle, and the bytes of tensors beside it
pending        A call under way: which rows go where
placement      Where roles live: the description of it, and several groups of roles behind one interface
processes      Roles in sibling processes on this machine, which the driver starts and ends
ray            Roles in Ray actors, on this machine or on a cluster: the same calls
ray_actor      What runs in a Ray actor: the roles of one process, and the calls to them
ray_crew       The actors of a group: hired in Ray, introduced to each other, listened to, and ended
ray_placement  The description of roles in Ray: which cluster, which roles live together
ray_session    A connection to Ray: to a cluster given by its address
rooms          Memory for an answer that is joined already
versions       What must be the same in all processes of a run, for they exchange Python objects and numbers
worker         A worker process: `python -m verl.cluster.worker`
"""
