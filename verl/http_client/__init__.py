"""An HTTP client for many concurrent requests: rate and concurrency limits, retries, cache.

client    An HTTP client for many concurrent requests: rate and concurrency limits, time-outs, retries with back-off
endpoint  A server: its settings, their checks, and the key
request   A request to a server, the report about it, and a disk cache of answers
"""
