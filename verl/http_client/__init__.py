"""An HTTP client for many concurrent requests: limits of rate and number, retries, cache.

cache     A cache of answers on disk, shared by runs: what was asked once is not asked, waited for and paid again
client    An HTTP client for many concurrent requests: limits of number, rate and time; retries with back-off
endpoint  Configuration of a server: address, key, limits, time-outs and retries
request   A request to a server, and what became of it
"""
