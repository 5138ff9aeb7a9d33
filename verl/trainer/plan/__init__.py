"""`verl plan`: memory, time and disk of a run before anything is loaded. Every run makes the same plan at its start.

activations      Activation memory of a micro-batch, by running one and two layers on fake tensors
async_plan       Asynchronous training, simulated: speed, idle shares and staleness, for `verl plan --async`
memory           Memory by role and phase, on devices and in main memory
run_plan         The plan of a run: memory, batch arithmetic, time, disk, and what makes it fit
step_time        Seconds of a step by stage
workload         Inputs of a plan: rows and tokens of a step, and rates of devices
"""
