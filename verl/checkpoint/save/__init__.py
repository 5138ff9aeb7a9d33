"""From live tensors to a committed checkpoint, while training continues.

async_writer    CheckpointWriter: saves live tensors as a committed checkpoint in the background
host_buffer     Host buffers: shared memory that a snapshot is copied into and the writer process reads
save_executor   Executes the plan of a save: from bytes in memory to a committed checkpoint
save_plan       The plan of a save in terms of bytes in memory: all that the process that writes it must know
save_request    A save as the trainer asks for it: components with live tensors, small files, links, state
snapshot        Snapshots: live tensors copied into a host buffer
writer_client   The trainer's side of the writer process: started when needed, restarted when it died
writer_process  The writer process: `python -m verl.checkpoint.save.writer_process`
"""
