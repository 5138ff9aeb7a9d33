"""Object storage: local directories, memory, S3, OSS and GCS behind one small interface.

options.py      what is configured: kind, bucket, prefix, limits
store.py        ObjectStore: what the rest of verl talks to; retries, time-outs, parts, order
backend.py      one request, tried once; a local directory
filesystems.py  the same by fsspec: memory, S3, OSS, GCS; the only module that imports fsspec or s3fs
retrying.py     asking again, with back-off
"""
