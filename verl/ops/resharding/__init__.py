"""Layouts of sharded tensors, and the plan and exchange that take tensors from one layout to another.

dtensor  Layouts of DTensors: what this process holds of a sharded tensor
execute  Executes a plan between two layouts: slices travel from rank to rank, tensor by tensor
layout   Layouts: which rank holds which slice of which tensor. Arithmetic on shapes: no tensor, no process
plan     The plan from one layout to another: what has to move, computed once, before anything moves
rounds   When each slice of a plan travels: rounds in bounded memory, without idle ranks
"""
