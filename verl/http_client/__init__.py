"""An HTTP client for many concurrent requests: rate and concurrency limits, retries, cache.

cache     A disk cache of answers, shared by runs
client    An HTTP client for many concurrent requests: rate and concurrency limits, time-outs, retries with back-off
endpoint  Configuration of a server: its settings, their checks, and the key
request   A request to a server, and the report about it
settings  Settings of a server: address, limits, time-outs and retries
"""
