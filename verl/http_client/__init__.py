"""An HTTP client for many concurrent requests: rate and concurrency limits, retries, cache.

client    An HTTP client for many concurrent requests: rate and concurrency limits, time-outs, retries with back-off
endpoint  Configuration of a server: checks of its settings, and the key
request   Settings of a server, a request to it, the report about it, and a disk cache of answers
"""
