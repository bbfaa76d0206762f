"""The command line; arguments, printing, file paths and no logic."""
