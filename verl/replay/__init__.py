"""The replay buffer: scored rows in device memory, in Arrow files on local disk, in object storage.

arrow_rows        Rows without padding: a batch of tensors as an Arrow record batch
buffer            TieredBuffer: a replay buffer of scored rows, the newest in device memory, most on disk
checkpoint        Saving and restoring the replay buffer: shard files are hard-linked
checkpoint_state  The replay buffer's state as a checkpoint takes it: shard files to link, and small files
config            The group `replay`: number of rows, tiers, and sampling
disk_tier         The disk tier: shards as Arrow IPC files, written once, durable, never changed
remote_tier       The remote tier: old shards in object storage
sampling          Sampling from the replay buffer: which old rows a step uses
write_buffer      The memory tier, and rows that wait to be written as shards
"""
