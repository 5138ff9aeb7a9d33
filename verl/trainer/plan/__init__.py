"""`verl plan`: memory, time and disk of a run before anything is loaded.

activations      Bytes that a training step keeps of a micro-batch, by running one and two layers on fake tensors
devices          Rates of devices: memory, matrix products, bandwidth and links, from data sheets or measured
memory           Bytes in each process, by phase and part, and what of them lies in main memory
memory_estimate  The quick estimate that every run makes at its start, by counts alone
run_plan         The plan of a run: memory, batch arithmetic, time, disk, and what makes it fit
step_time        Seconds of a step by stage
unused_settings  Settings that a user has changed and that the run never reads
"""
