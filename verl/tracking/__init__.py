"""Where the metrics, samples and log lines of a run go.

console      What a person sees while a run trains: a progress bar, one line per step, a line per stage
curves       At the end of a run, one picture of it: reward, accuracy, KL, response length and losses over steps
jsonl        Metrics and samples as JSON lines in the run directory: complete, readable by anything
logs         Where the log lines of a run go: the console, and run.log in the run directory, both without secrets
sweep_table  What the jobs of a sweep came to, side by side: on the terminal, in a CSV file and as a picture
tensorboard  Metrics as TensorBoard event files in the run directory
tracker      What every tracker can do: the interface that a new place for metrics fills in
trackers     All trackers of a run as one: text is redacted once
wandb        Metrics to Weights & Biases; without a key, to offline files that `wandb sync` uploads later
"""
