"""The commit protocol: staging, and publication by a rename.

rank_writer   RankWriter: one writer of a save (a thread, this process or another rank); direct I/O
store         CheckpointStore, and a save in progress: writers write below `staging/`, one commit verifies it
upload_state  Upload state of a checkpoint directory: where its object storage is
"""
