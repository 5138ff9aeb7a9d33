"""Object storage: local directories, S3, OSS and GCS behind one small interface.

config           The group `storage`: which object storage, and its time-outs and retries
fsspec_backends  Backends over fsspec: S3 (s3fs), OSS (ossfs), GCS (gcsfs)
store            ObjectStore: objects by key, with retries, multipart uploads and concurrent requests; `Backend`
"""
