"""Engines in processes of their own, of any kind: their life cycle, calls, turns, and what a failure leads to.

engine    The running engine, seen from the processes that hold the model: requests, syncs, repeats after a failure
messages  Messages between the trainer and the process of an engine
options   Options that every such engine has
process   The process: started, called and killed by the trainer. It ends with the trainer
serve     The main program of the process
turns     Requests to the process: turns in, tokens out
"""
