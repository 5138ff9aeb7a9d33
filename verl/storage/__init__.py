"""Object storage: local directories, S3, OSS and GCS behind one small interface.

buckets  Buckets of S3, GCS and OSS, by obstore
config   The group `storage`: which object storage, and its time-outs and retries
store    ObjectStore: objects by key, with retries and concurrent requests; `Backend`, and that of a directory
"""
