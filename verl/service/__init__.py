"""Training sessions: the verbs of a training loop of one's own, in Python and as a service in Tinker's protocol.

session    TrainingSession: forward_backward, optim_step, sample, save, load
adapters   Several adapters on one base model in memory
losses     Losses by name, as sums over target tokens
data       Rows of tokens with targets, checked and padded
sampling   Responses with log-probs, noise by seed, stop texts; scores of rows
saved      Saved sessions: peft's files, the optimizer, a record with digests
service    Sessions of clients, models, samplers and saved weights of a service
jobs       Its work: requests in order, batches of samples, results
wire       Messages of Tinker's SDK in protobuf
http_api   The protocol over HTTP
"""
