"""The commit protocol: who may write, what is staged, and how a checkpoint becomes visible.

delta_base    What an incremental save stores of a file: nothing, its difference from a base, or all of it
fencing       Fencing: one trainer at a time writes a directory; a later claim fences the earlier writer out
rank_writer   RankWriter: one writer of a save (a thread, this process or another rank)
store         CheckpointStore: where a save begins and is committed, and where what it leaves behind is cleaned
transaction   A save in progress: writers write below `staging/`
upload_state  Upload state of a checkpoint directory: where its object storage is
"""
