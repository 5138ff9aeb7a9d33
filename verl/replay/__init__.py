"""The replay buffer: scored rows in device memory, in Arrow files on local disk, in object storage.

buffer    TieredBuffer: one buffer of scored rows, whose newest are in device memory, most on disk
cold      The coldest shards: in an object storage, brought there and back by threads while training goes on
index     What is known of every row without reading it: which group, when it was drawn, what it earned
queues    Rows in memory, oldest first: those of the hot layer, and those that are not on the disk yet
rows      Rows without padding: a batch of tensors as an Arrow record batch
sampling  Which old rows a step takes: a race of all that may be taken
saved     A buffer in a checkpoint, as whoever saves it sees it: files to be linked, and small ones
settings  How many rows are kept, where, and which of them are drawn: the group `replay`
shards    Shards: Arrow IPC files of rows, written once, durable and whole under their names, and never changed
shelf     All shards of a buffer, by the rows they hold: here as files that are mapped when rows are read
state     The buffer in a checkpoint: its shards as they are, linked
tail      The newest rows, on their way to the disk: collected until they fill a shard, and written by a thread
"""
