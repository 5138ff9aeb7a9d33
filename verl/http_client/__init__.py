"""An HTTP client for many concurrent requests: rate and concurrency limits, retries, cache.

cache     A disk cache of answers, shared by runs
client    An HTTP client for many concurrent requests: rate and concurrency limits, time-outs, retries with back-off
endpoint  Configuration of a server: address, key, limits, time-outs and retries
request   A request to a server, and the report about it
"""
