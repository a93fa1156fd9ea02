"""Expert parallelism with moving experts for the MoE models of Hugging Face transformers: the models' own code, our slots.

settings    how a group is laid out
found       where a model has its experts, and what they must be like
engine      the model over the ranks of a process group, step by step
port        `EnginePort` for the hook
backup      its checkpoint, for experts that no rank holds any more
batch       requests generated together, in lock-step with the other ranks

Nothing in here imports transformers: a model is a `torch.nn.Module` whose experts have the shape that `found` describes. Slots,
dispatch and exchange are the reference engine's.
"""
