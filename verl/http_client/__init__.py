"""An HTTP client for many concurrent requests: rate and concurrency limits, retries.

client    An HTTP client for many concurrent requests: rate and concurrency limits, time-outs, retries with back-off
endpoint  Configuration of a server: checks of its settings, and the key
request   Settings of a server, a request to it, and the report about it
"""
