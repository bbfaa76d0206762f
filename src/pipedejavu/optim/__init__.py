"""AdamW's arithmetic, which the engine and the hybrid optimizer share.

There is a reference in torch, one native pass over host memory and one GPU kernel, all with the same bits. Knows
nothing of programs, models and places of state.
"""
