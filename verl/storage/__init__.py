"""Object storage: local directories, memory, S3, OSS and GCS behind one small interface.

backend      One request to a store, tried once; and the plainest store, a directory
filesystems  Stores that fsspec knows: memory, S3 (s3fs), OSS (ossfs), GCS (gcsfs)
options      Which object storage, and how it is treated: the group `storage`. Credentials are never part of it
retrying     Asking again: back-off that doubles, jitter, and an end to it
store        ObjectStore: objects by key, asked until the store answers, long ones in parts
"""
