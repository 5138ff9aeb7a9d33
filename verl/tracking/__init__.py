"""Trackers: destinations of the metrics, samples and log lines of a run.

base           The interface of trackers, and the set of all trackers of a run
console        Console output of a run: a progress bar, one line per step, a line per stage, a few samples
jsonl          Metrics and samples as JSON lines in the run directory
logging_setup  Logging of a run: the console, and run.log in the run directory, both without secrets
sweep_table    The jobs of a sweep compared, on the terminal and as CSV
tensorboard    Metrics as TensorBoard event files in the run directory
wandb          Metrics to Weights & Biases; without an API key to offline files for `wandb sync`
"""
