"""Evaluation for trainers that are not ours: Hugging Face (and TRL), Lightning, and loops of one's own.

Invariants: beside its host (torch, transformers, lightning) nothing here needs more than `eval_service.contract` needs;
rank 0 alone acts; whatever goes wrong after the start is recorded, and training goes on.
"""
