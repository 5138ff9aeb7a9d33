"""Where the metrics, samples and log lines of a run go.

base           The interface of trackers, and the set of all trackers of a run
console        Console output of a run: a progress bar, one line per step, a line per stage, a few samples
jsonl          Metrics and samples as JSON lines in the run directory: complete, readable by anything
logging_setup  Logging of a run: the console, and run.log in the run directory, both without secrets
plots          At the end of a run, one picture of it: reward, accuracy, KL
sweep_table    The jobs of a sweep side by side: on the terminal, in a CSV file and as a picture
tensorboard    Metrics as TensorBoard event files in the run directory
wandb          Metrics to Weights & Biases; without a key, to offline files that `wandb sync` uploads later
"""
