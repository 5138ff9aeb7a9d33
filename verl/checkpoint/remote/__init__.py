"""Checkpoints in object storage, behind the local disk.

commit_log      Who may write to a remote store: the log of numbered claims and checkpoints
remote_store    Checkpoints of a remote store: which there are, which is the newest, are they complete
transfer        The remote tier of a run: upload of a checkpoint, and download of one into a directory
upload_process  The upload process (`python -m verl.checkpoint.remote.upload_process`), and `Uploader`
"""
