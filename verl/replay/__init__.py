"""The replay buffer: scored rows in device memory, in Arrow files on local disk, in object storage.

arrow_rows   Rows without padding: a batch of tensors as an Arrow record batch
buffer       TieredBuffer: a replay buffer of scored rows, the newest in device memory, most on disk
config       The group `replay`: number of rows, tiers, and which old rows a step samples
mixing       Replay mixing: rows of earlier steps added to those of this one
remote_tier  The remote tier: old shards in object storage
shard        Shards, the index over them, and their list in a checkpoint
"""
