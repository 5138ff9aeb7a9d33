"""Saving: live tensors become a committed checkpoint while training continues.

async_writer    CheckpointWriter: saves live tensors as a committed checkpoint in the background
host_buffer     Host buffers: shared memory that a snapshot is copied into and the writer process reads
save_executor   Executes a save, in the writer process or the trainer's: from bytes in memory to a commit
save_request    The record of one save, its outcome, and the reports of several processes
snapshot        Snapshots: components of a save, their layout in a host buffer, and the copy of live tensors into it
writer_process  The writer process, and the trainer's side of it
"""
