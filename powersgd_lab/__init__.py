"""Experiments and hyperparameter search around PowerSGD gradient compression, and the hook itself.
The hook's names are PyTorch's, so that a script changes one import line."""
