"""The replay buffer: scored rows in device memory, in Arrow files on local disk, in object storage.

arrow_rows        Rows without padding: a batch of tensors as an Arrow record batch
buffer            TieredBuffer: a replay buffer of scored rows, the newest in device memory, most on disk
checkpoint        Saving and restoring the replay buffer: shards are linked as they are
checkpoint_state  The replay buffer's state as a checkpoint takes it: files to be linked, and small ones
config            The group `replay`: how many rows are kept, where, and which of them are sampled
disk_tier         The disk tier: shards as Arrow IPC files, written once, durable and complete under their names
remote_tier       The remote tier: old shards in object storage
sampling          Sampling from the replay buffer: which old rows a step takes
write_buffer      Rows in memory, oldest first: the memory tier
"""
