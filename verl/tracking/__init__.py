"""Trackers: destinations of the metrics, samples and log lines of a run.

base           The interface of trackers, and the set of all trackers of a run
console        Console output of a run: a progress bar, one line per step, a line per stage, a few samples
jsonl          Metrics and samples as JSON lines in the run directory
logging_setup  Logging of a run: the console, and run.log in the run directory, both without secrets
mlflow         Metrics to MLflow: a tracking server, or files in a directory
sweep_table    The jobs of a sweep compared, on the terminal and as CSV
tensorboard    Metrics as TensorBoard event files in the run directory
trackio        Metrics to Trackio: a local database, or a Space of Hugging Face
wandb          Metrics to Weights & Biases; without an API key to offline files for `wandb sync`
"""
