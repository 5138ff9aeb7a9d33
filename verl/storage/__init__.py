"""Object storage: local directories, memory, S3, OSS and GCS behind one small interface.

backend          One request to a store, the policy that retries it, and the plainest store, a directory
config           The group `storage`: which object storage, and how it is treated
fsspec_backends  Backends over fsspec: memory, S3 (s3fs), OSS (ossfs), GCS (gcsfs)
store            ObjectStore: objects by key, with retries, multipart uploads and several requests at a time
"""
