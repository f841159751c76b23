"""The plain PyTorch loop on one device that every run must follow. It ships with the package, where `rehearse --parity` runs it too."""

from fsdp_tune.check.parity.plain_loop import LoopSettings, Trajectory, train

__all__ = ["LoopSettings", "Trajectory", "train"]
