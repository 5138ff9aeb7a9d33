"""The processes of engines of any kind: their life cycle, calls and turns.

messages  Messages between the trainer and the process of an engine
options   Options that every such engine has
process   The process: started, called and killed by the trainer. It ends with the trainer
serve     The main program of the process
turns     Requests to the process: turns in, tokens out
"""
