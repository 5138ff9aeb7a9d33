"""Checkpoints in object storage, behind the local disk.

commit_log      Who may write to a remote store: the commit log of numbered records, and the lease of a run
remote_store    Checkpoints of a remote store: which there are, which is the newest, are they complete
resolve         The remote tier of a run, and checkpoints that an address or a digest names
transfer        Upload of one checkpoint into a remote store, and download of one into a directory
upload_process  The upload process (`python -m verl.checkpoint.remote.upload_process`), and `Uploader`
"""
