"""Checkpoints in object storage, behind the local disk.

commit_log      The commit log of a remote store: numbered records, each created by a conditional put
download        Download of one checkpoint from a remote store into a directory
lease           The lease of a run on its place in a remote store
remote_store    Checkpoints of a remote store: which there are, which is the newest, are they complete
resolve         The remote tier of a run, and checkpoints that an address or a digest names
upload          Upload of one checkpoint into a remote store: objects, then the manifest
upload_process  The upload process (`python -m verl.checkpoint.remote.upload_process`), and `Uploader`
"""
