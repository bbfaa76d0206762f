"""Experiments that the project reproduces: each one trains, measures or simulates, and returns findings.

An experiment sets figures of today beside published ones. It does not know the command line, and writes no page.
"""

from pipedejavu.reproduce.experiment import EXPERIMENTS, Experiment, Scale, Setting, experiment, run_experiment

__all__ = ["EXPERIMENTS", "Experiment", "Scale", "Setting", "experiment", "run_experiment"]
